# SPDX-License-Identifier: Apache-2.0
"""The exception tree: all errors that Phalanx raises on purpose.

    PhalanxError
    +-- OptionError (ValueError)          an option, environment value or API field is not valid
    |   +-- UnknownOption (TypeError)     the name is unknown; names the nearest known one
    |   +-- LayoutError                   the layout does not fit the model or the machine
    +-- ModelError                        the checkpoint cannot be used
    |   +-- ModelNotFound                 no such folder, no such Hub id, or the Hub cannot be reached
    |   +-- UnsupportedArchitecture       lists the supported ones
    |   +-- WeightError                   a tensor or file is missing, truncated or contradicts config.json
    +-- CapacityError                     the memory budget is too small
    +-- RequestError (ValueError)         one request is rejected; the engine goes on
    |   +-- PromptTooLong                 the prompt exceeds max_seq_len; has both numbers
    |   +-- Overloaded                    a queue is full
    |   +-- AdapterError                  an adapter cannot be loaded
    |   |   +-- AdapterNotFound           no adapter has this name
    +-- LogitsNotFinite                   a model's logits are NaN or infinite: one request ends; the engine goes on
    +-- TableError                        a tuning table, CSV or C++ file is faulty; names file, row and remedy
    +-- EngineError                       the engine cannot go on
        +-- RankDied                      names the rank and the signal or exit status
        +-- RankStalled                   names the rank and for how long it has been silent
        +-- NodeLost                      names the node
        +-- StepDiverged                  the ranks disagree about the step
        +-- SelfCheckFailed               names what moved the answers of this machine
        +-- EngineClosed                  shut down, or never started
            +-- EngineAsleep              takes no requests until it is woken up

Every message leads with the failure, then says what there is, why, and what to do next. `to_wire` and `from_wire` carry an error
between processes without pickle.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class PhalanxError(Exception):
    """Base of all errors that Phalanx raises on purpose.

    failure: what is wrong; a complete message, for example "tensor_parallel_size=3 does not divide num_attention_heads=32".
    held: what there is instead. why: the cause. next: what to do, in the imperative. The parts are joined with "; " in this order.
    """

    def __init__(self, failure: str, *, held: str = "", why: str = "", next: str = "") -> None:
        self.failure, self.held, self.why, self.next = failure, held, why, next
        super().__init__("; ".join(part for part in (failure, held, why, next) if part))

    def to_wire(self) -> dict[str, str]:
        return {"kind": type(self).__name__, "failure": self.failure, "held": self.held, "why": self.why, "next": self.next}

    @staticmethod
    def from_wire(wire: dict[str, Any]) -> PhalanxError:
        kind = _KINDS.get(str(wire.get("kind")), EngineError)
        return kind(wire["failure"], held=wire["held"], why=wire["why"], next=wire["next"])

    def copy(self) -> PhalanxError:
        """The same error for another waiter. An exception that is raised twice would collect the tracebacks of both."""
        return PhalanxError.from_wire(self.to_wire())


class OptionError(PhalanxError, ValueError):
    """An option, environment value or API field is not valid."""


class UnknownOption(OptionError, TypeError):
    """The name is unknown; the message names the nearest known one."""


class LayoutError(OptionError):
    """The layout does not fit the model or the machine."""


class ModelError(PhalanxError):
    """The checkpoint cannot be used."""


class ModelNotFound(ModelError):
    """No such folder, no such Hub id, or the Hub cannot be reached."""


class UnsupportedArchitecture(ModelError):
    """The architecture is not supported; the message lists those that are."""


class WeightError(ModelError):
    """A tensor or file is missing, truncated, or contradicts config.json."""


class CapacityError(PhalanxError):
    """The memory budget is too small; the message says what would fit."""


class RequestError(PhalanxError, ValueError):
    """One request is rejected; the engine goes on."""


class PromptTooLong(RequestError):
    """The prompt is too long for max_seq_len; the message has both numbers."""


class Overloaded(RequestError):
    """A queue is full; try again later. retry_after: in so many seconds, where that is known; not sent between processes."""

    retry_after: int | None = None


class AdapterError(RequestError):
    """An adapter cannot be loaded, or a name is taken; the engine goes on as before."""


class AdapterNotFound(AdapterError):
    """No adapter has this name; the message lists those that there are."""


class TableError(PhalanxError):
    """A tuning table, CSV or C++ file is faulty; the message names file, row and remedy."""


class LogitsNotFinite(PhalanxError):
    """A model's logits are NaN or infinite: one request ends without a token; the engine goes on."""


class EngineError(PhalanxError):
    """The engine cannot go on."""


class RankDied(EngineError):
    """A rank ended; the message has its number, and the signal or exit status."""


class RankStalled(EngineError):
    """A rank stalled; the message has its number, and for how long it has been silent."""


class NodeLost(EngineError):
    """A node no longer answers; the message has its number and address."""


class StepDiverged(EngineError):
    """The ranks disagree about the step that they run."""


class SelfCheckFailed(EngineError):
    """The answers of this machine are not those of the reference path; the message names the part that moved them."""


class EngineClosed(EngineError):
    """The engine was shut down, or never started."""


class EngineAsleep(EngineClosed):
    """The engine has given the memory of the model back; it takes requests after POST /wake_up."""


@contextmanager
def file_named(name: object) -> Iterator[None]:
    """An OSError of a write, as on a full disk, names no file: here it names this one."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(name)
        raise


def _tree(kind: type[PhalanxError]) -> dict[str, type[PhalanxError]]:
    tree = {kind.__name__: kind}
    for sub in kind.__subclasses__():
        tree |= _tree(sub)
    return tree


_KINDS = _tree(PhalanxError)
