# SPDX-License-Identifier: Apache-2.0
"""From what the user calls a model to a folder on this host: a folder, "demo", or an id on the Hugging Face Hub."""

from __future__ import annotations

import fcntl
import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from phalanx.config.model import CONFIG
from phalanx.errors import ModelNotFound
from phalanx.log import get_logger

logger = get_logger(__name__)

DEMO = Path(__file__).resolve().parent.parent / "demo_model"
"""The checkpoint that comes with the package."""

_WANTED = ["*.json", "*.safetensors", "tokenizer*", "*.jinja", "*.model"]
_UNWANTED = ["consolidated*", "original/*", "onnx/*"]  # second copies in formats that nobody here reads

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def locate(model: str, revision: str | None = None, *, need: str = CONFIG, option: str = "model") -> Path:
    """The folder of a model. "demo" is the package's own (a folder of that name is ./demo); what exists as a path is a folder; the
    rest is a Hub id, downloaded at `revision` (branch, tag or commit) once per host. Hugging Face's offline mode is respected.

    need: the file that makes a folder one of the kind asked for; "": any folder does. option: which option named it, for errors.
    Raises ModelNotFound saying what to do.
    """
    if model == "demo":
        return _checked(DEMO, model, need, option)
    try:
        path = Path(model).expanduser()
        if path.exists() or not _HUB_ID.fullmatch(model) or model.startswith("."):
            return _checked(path, model, need, option)
    except (OSError, RuntimeError) as error:  # the latter: "~" of somebody whom this host does not know
        why = getattr(error, "strerror", None) or str(error)
        raise ModelNotFound(
            f"{option} {model!r} was asked for", held="it cannot be looked at", why=why,
            next="give a folder that this user may read",
        ) from None  # fmt: skip
    return _checked(_download(model, revision, option), model, need, option)


def locate_tokenizer(tokenizer: str | None, model: str, revision: str | None) -> Path:
    """The folder of the tokenizer: the one named, or the model's at `revision`. Raises as `locate`."""
    return locate(tokenizer, need="", option="tokenizer") if tokenizer else locate(model, revision)


def _checked(folder: Path, model: str, need: str, option: str) -> Path:
    asked = f"{option} {model!r} was asked for"
    if not folder.exists():
        raise ModelNotFound(
            asked, held=f"there is no folder {folder}",
            next=f"give a folder with a {'checkpoint' if option == 'model' else option}, or a Hub id such as 'org/name'",
        )  # fmt: skip
    if not folder.is_dir():
        raise ModelNotFound(asked, held=f"{folder} is a file", next="give the folder that holds it")
    if need and not (folder / need).exists():
        names = sorted(path.name for path in folder.iterdir())
        seen = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        raise ModelNotFound(
            asked, held=f"{folder} holds {seen or 'nothing'}", why=f"it has no {need}",
            next="give the folder of a Hugging Face checkpoint",
        )  # fmt: skip
    return folder


def _download(model: str, revision: str | None, option: str) -> Path:
    import huggingface_hub
    from huggingface_hub import constants

    at = f" at revision {revision!r}" if revision else ""
    logger.info("looking for %s%s on the Hub and in its cache", model, at)
    try:
        with _alone(Path(constants.HF_HUB_CACHE) / ".locks" / f"phalanx--{model.replace('/', '--')}.lock"):
            found = huggingface_hub.snapshot_download(
                model, revision=revision, allow_patterns=_WANTED, ignore_patterns=_UNWANTED, library_name="phalanx"
            )
    except Exception as error:  # the Hub's client raises its own errors, the HTTP client's, and OSError
        raise _not_found(f"{option} {model!r}{at} was asked for", error) from error
    return Path(found)


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """One process of this host downloads; the others wait here and then find the files in the cache."""
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        held = lock.open("a")
    except OSError:  # a cache that cannot be written is one that nobody downloads into
        yield
        return
    with held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _not_found(asked: str, error: Exception) -> ModelNotFound:
    from huggingface_hub import constants, errors

    why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if isinstance(error, errors.GatedRepoError):
        return ModelNotFound(
            asked, held="the Hub has it, but gives it only to those who accepted its terms", why=why,
            next="accept the terms on its page, then log in with `hf auth login` or set HF_TOKEN",
        )  # fmt: skip
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelNotFound(asked, held="the Hub has no such revision of it", next="give a branch, tag or commit that exists")
    if isinstance(error, errors.RepositoryNotFoundError | errors.HFValidationError):
        return ModelNotFound(
            asked, held="there is no folder of that name, and the Hub shows no such model", why=why,
            next="check the spelling; for a private model log in with `hf auth login` or set HF_TOKEN",
        )  # fmt: skip
    if constants.HF_HUB_OFFLINE:
        return ModelNotFound(
            asked, held="this host's cache does not hold all of it", why="HF_HUB_OFFLINE is set, so nothing is downloaded",
            next="unset it, or download the model first",
        )  # fmt: skip
    return ModelNotFound(
        asked, held=f"neither the Hub at {constants.ENDPOINT} nor this host's cache gave it", why=f"{type(error).__name__}: {why}",
        next="check the network, give a local folder, or download the model first",
    )  # fmt: skip


def checkpoint_digest(folder: Path, *, weights: bool) -> str:
    """Of config.json's bytes, and with `weights` of the weight files' names and sizes: cheap, yet it tells checkpoints apart."""
    digest = hashlib.blake2b((folder / CONFIG).read_bytes(), digest_size=8)
    if weights:
        for file in sorted(folder.glob("*.safetensors")):
            digest.update(f"{file.name} {file.stat().st_size}\n".encode())
    return digest.hexdigest()
