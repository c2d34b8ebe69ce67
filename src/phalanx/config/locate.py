# SPDX-License-Identifier: Apache-2.0
"""Find the folder of a model on this host: the model is given as a folder, as "demo", or as a Hugging Face Hub id."""

from __future__ import annotations

import fcntl
import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from phalanx.config.mistral_format import PARAMS, WEIGHTS
from phalanx.config.model import CONFIG, config_file
from phalanx.errors import ModelNotFound
from phalanx.log import get_logger

logger = get_logger(__name__)

DEMO = Path(__file__).resolve().parent.parent / "demo_model"
"""The checkpoint inside the package."""

_FILES = ["*.json", "*.safetensors", "tokenizer*", "*.jinja", "*.model"]
_IGNORED_FILES = [WEIGHTS, "original/*", "onnx/*"]  # copies, of which no second one is read

_SAMPLES, _SAMPLE_BYTES = 128, 4096
"""Samples of the data of all weight files together, but at least one of each. All of them miss a twentieth of the data in one of
700 checkpoints."""
_HEADER_READ, _LONGEST_HEADER = 64 << 10, 1 << 20
"""Bytes of a header that are read at once, and in all."""

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def locate(model: str, revision: str | None = None, *, need: str = CONFIG, option: str = "model") -> Path:
    """The folder of a model.

    "demo" is the checkpoint inside the package (use ./demo for a folder of that name). An existing path is a folder. Anything else
    is a Hub id, which is downloaded at `revision` (branch, tag or commit) once per host; Hugging Face's offline mode is respected.
    need: a file that the folder must contain; "": any folder is accepted. option: the name of the option, for errors. Raises
    ModelNotFound with the next step.
    """
    if model == "demo":
        return _checked(DEMO, model, need, option)
    try:
        path = Path(model).expanduser()
        if path.exists() or not may_be_hub_id(model):
            return _checked(path, model, need, option)
    except (OSError, RuntimeError) as error:  # RuntimeError: "~name" of a user who does not exist here
        why = getattr(error, "strerror", None) or str(error)
        raise ModelNotFound(
            f"{option} {model!r} cannot be read", why=why, next="give a folder that this user may read",
        ) from None  # fmt: skip
    return _checked(_download(model, revision, option), model, need, option)


def may_be_hub_id(model: str) -> bool:
    """Whether the Hub may have a model of this name; any other name is a path."""
    return _HUB_ID.fullmatch(model) is not None and not model.startswith(".")


def locate_tokenizer(tokenizer: str | None, model: str, revision: str | None) -> Path:
    """The folder of the tokenizer: its own if one is given, else the model's at `revision`. Raises as `locate`."""
    return locate(tokenizer, need="", option="tokenizer") if tokenizer else locate(model, revision)


def _checked(folder: Path, model: str, need: str, option: str) -> Path:
    if not folder.exists():
        raise ModelNotFound(
            f"{option} {model!r} was not found", held=f"there is no folder {folder}",
            next=f"give a folder with a {'checkpoint' if option == 'model' else option}, or a Hub id such as 'org/name'",
        )  # fmt: skip
    refuse_gguf(folder, f"{option} {model!r}", need=need)
    if not folder.is_dir():
        raise ModelNotFound(f"{option} {model!r} is a file", held=f"the file is {folder}", next="give the folder that contains it")
    if need and not (folder / need).exists() and not (need == CONFIG and (folder / PARAMS).exists()):
        names = sorted(path.name for path in folder.iterdir())
        listed = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        raise ModelNotFound(
            f"{option} {model!r} has no {need}", held=f"{folder} contains {listed or 'nothing'}",
            next="give the folder of a Hugging Face checkpoint",
        )  # fmt: skip
    return folder


def refuse_gguf(path: Path, name: str, *, need: str = CONFIG) -> None:
    """Raise ModelNotFound if `path` is a GGUF file, by its first four bytes, or a folder that has GGUF files and not `need`.

    name: of the model, for the error. Of a Hub id, GGUF files are not downloaded: its name says what they are.
    """
    if path.is_dir():
        lacks = bool(need) and not (path / need).exists()
        gguf, words = lacks and ("gguf" in name.lower() or any(path.glob("*.gguf"))), "has GGUF files only"
    else:
        gguf, words = _begins_as_gguf(path), "is a GGUF file"
    if gguf:
        raise ModelNotFound(
            f"{name} {words}", why="Phalanx reads Hugging Face checkpoints (config.json and safetensors), not GGUF",
            next="give the folder or the Hub id of the checkpoint that the GGUF file was made from",
        )  # fmt: skip


def _begins_as_gguf(path: Path) -> bool:
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def _download(model: str, revision: str | None, option: str) -> Path:
    import huggingface_hub
    from huggingface_hub import constants

    at = f" at revision {revision!r}" if revision else ""
    logger.info("fetching %s%s from the Hub, or from its cache on this host", model, at)
    try:
        with _host_lock(Path(constants.HF_HUB_CACHE) / ".locks" / f"phalanx--{model.replace('/', '--')}.lock"):
            fetch = partial(
                huggingface_hub.snapshot_download, model, revision=revision, allow_patterns=_FILES, library_name="phalanx"
            )
            folder = fetch(ignore_patterns=_IGNORED_FILES)
            if config_file(Path(folder)).name == PARAMS:
                folder = fetch(ignore_patterns=_IGNORED_FILES[1:])
    except Exception as error:  # the client of the Hub raises its own errors, those of its HTTP client, and OSError
        raise _download_error(f"{option} {model!r}{at}", error) from error
    return Path(folder)


@contextmanager
def _host_lock(lock: Path) -> Iterator[None]:
    """One process per host downloads. The others wait here, and then find the files in the cache."""
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("a")
    except OSError:  # nothing is downloaded into a cache that cannot be written
        yield
        return
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download_error(name: str, error: Exception) -> ModelNotFound:
    from huggingface_hub import constants, errors

    why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if isinstance(error, errors.GatedRepoError):
        return ModelNotFound(
            f"{name} is gated on the Hub", held="only users who accepted its terms may download it", why=why,
            next="accept the terms on its page, then log in with `hf auth login` or set HF_TOKEN",
        )  # fmt: skip
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelNotFound(
            f"{name} does not exist", held="the Hub has no such revision", next="give an existing branch, tag or commit"
        )
    if isinstance(error, errors.RepositoryNotFoundError | errors.HFValidationError):
        return ModelNotFound(
            f"{name} was not found", held="there is no folder of that name, and the Hub shows no such model", why=why,
            next="check the spelling; for a private model log in with `hf auth login` or set HF_TOKEN",
        )  # fmt: skip
    if constants.HF_HUB_OFFLINE:
        return ModelNotFound(
            f"{name} is not in this host's cache, or not all of it", why="HF_HUB_OFFLINE is set, so nothing is downloaded",
            next="unset it, or download the model first",
        )  # fmt: skip
    return ModelNotFound(
        f"{name} could not be downloaded", held=f"neither the Hub at {constants.ENDPOINT} nor this host's cache has it",
        why=f"{type(error).__name__}: {why}",
        next="check the network, give a local folder, or download the model first",
    )  # fmt: skip


def checkpoint_digest(folder: Path, *, weights: bool) -> str:
    """Digest of config.json, or params.json, and, with `weights`, of each weight file: its name, its size, its header, and
    samples of its data.

    So it differs between a checkpoint and its fine-tune, which has the same names, shapes and sizes. Of a checkpoint of 30 files it
    reads 30 headers and 150 samples of 4 KiB: 180 reads, and a few megabytes at most.
    """
    digest = hashlib.blake2b(config_file(folder).read_bytes(), digest_size=8)
    files = sorted(folder.glob("*.safetensors")) if weights else []
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb", buffering=0) as file:
            header = file.read(_HEADER_READ)
            # As the format begins: the length of the header, which is JSON; the data follow it.
            data = min(8 + int.from_bytes(header[:8], "little"), size)
            digest.update(header[:data])
            digest.update(file.read(max(min(data, _LONGEST_HEADER) - len(header), 0)))
            samples = -(-_SAMPLES // len(files))
            for index in range(samples):
                file.seek(data + max(size - data - _SAMPLE_BYTES, 0) * index // max(samples - 1, 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
