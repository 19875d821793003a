"""Fingerprints of configurations, tokenizers, data and packages: ``sha256:`` and 64 hex digits, of content alone.

File times, owners, and where a folder lies do not count. Compute them on one rank and share them.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader

from txstore.compat.canonical import dump, plain_form
from txstore.errors import ConfigError, describe

_DEEPEST = 32
_CHAT_TEMPLATE = "chat_template"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")


def text_fingerprint(data: bytes) -> str:
    """Of bytes."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def config_fingerprint(config: object, *, exclude: Collection[str] = ()) -> str:
    """Of a configuration: dataclass, dict, msgspec Struct, `argparse.Namespace`, or any mapping (OmegaConf's, too).

    Equal names and values have one fingerprint, whatever holds them and in whatever order.

    Args:
        config: The configuration.
        exclude: Names at its top level that do not count, such as ``output_dir``.

    Raises:
        ConfigError: A value has no exact form (the message has its path), or an excluded name does not exist.
    """
    if isinstance(exclude, str):
        raise ConfigError(f"exclude must be several names, not the string {exclude!r}", next_step=f"({exclude!r},)")
    plain = plain_form(config)
    for name in exclude:
        # A misspelt name would silently count again.
        if not isinstance(plain, dict) or plain.pop(json.dumps(name), config) is config:
            raise ConfigError(f"the configuration lacks the name {name!r} that exclude gives", key=name)
    return text_fingerprint(dump(plain))


def tokenizer_fingerprint(source: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> str:
    """Of a tokenizer's files: the folder that ``save_pretrained`` wrote, or a list of files.

    Names, sizes and contents count. The chat template has a fingerprint of its own, so neither its files nor its entry
    in ``tokenizer_config.json`` count here. Names that begin with a dot are left out: download caches keep times there.

    Raises:
        ConfigError: Nothing there, two files of one name, or a folder that holds weights, too.
    """
    files = dict(_named_files(source))
    weights = sorted(name for name in files if name.endswith(_WEIGHTS))
    if weights:
        raise ConfigError(
            f"a folder of a tokenizer holds weights: {', '.join(weights)}",
            key=weights[0],
            next_step="pass the list of the tokenizer's files",
        )
    counted = {name: path for name, path in files.items() if not _is_chat_template(name)}
    if not counted:
        raise ConfigError("no files of a tokenizer", key=str(source))
    return config_fingerprint({name: _tokenizer_file(name, path) for name, path in counted.items()})


def chat_template_fingerprint(template: str | Mapping[str, str] | os.PathLike[str]) -> str:
    """Of a chat template: its text (``tokenizer.chat_template``), several by name, or a `pathlib.Path` to its file."""
    if isinstance(template, os.PathLike):
        template = _read(os.fspath(template)).decode("utf-8", errors="surrogateescape")
    return config_fingerprint(template)


@dataclass(frozen=True, slots=True)
class DatasetFile:
    """One file of a dataset: its name, size in bytes, and SHA-256 or another digest if it is known."""

    name: str
    size_bytes: int
    digest: str = ""


def dataset_files(folder: str | os.PathLike[str], *, hashed: bool = False) -> tuple[DatasetFile, ...]:
    """The files of a folder, sorted by name. Without `hashed` no content is read: a changed byte is then not seen."""
    return tuple(
        DatasetFile(name, _size(path), _digest(path) if hashed else "")
        for name, path in sorted(_walk(os.fspath(folder), "", 0))
    )


def dataset_fingerprint(manifest: os.PathLike[str] | Iterable[DatasetFile]) -> str:
    """Of a dataset manifest: a `pathlib.Path` to a text that names the data, or its files.

    The order of files counts, because a cursor counts along it.

    Raises:
        ConfigError: Nothing there, or a file twice.
    """
    if isinstance(manifest, os.PathLike):
        return text_fingerprint(_read(os.fspath(manifest)))
    files = list(manifest)
    if not all(isinstance(file, DatasetFile) for file in files):
        raise ConfigError("a dataset manifest is a pathlib.Path or DatasetFiles, not plain strings")
    if not files or len({file.name for file in files}) != len(files):
        raise ConfigError("a dataset manifest must name files, and each once")
    return config_fingerprint(files)


def packages_fingerprint(names: Iterable[str]) -> str:
    """Of the installed versions of packages.

    Raises:
        ConfigError: One is not installed.
    """
    versions = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError as error:
            raise ConfigError(f"package {name!r} is not installed", key=name) from error
    return config_fingerprint(versions)


def _is_chat_template(name: str) -> bool:
    return name.split("/", maxsplit=1)[0] in {"chat_template.jinja", "chat_template.json", "additional_chat_templates"}


def _tokenizer_file(name: str, path: str) -> object:
    """Size and digest of a file; of ``tokenizer_config.json`` its content without the chat template."""
    if name == "tokenizer_config.json":
        text = _read(path)
        try:
            settings = json.loads(text)
        except ValueError:
            settings = None
        if isinstance(settings, dict):
            settings.pop(_CHAT_TEMPLATE, None)
            return {"settings": settings}
    return [_size(path), _digest(path)]


def _named_files(source: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> Iterator[tuple[str, str]]:
    if isinstance(source, (str, os.PathLike)):
        yield from _walk(os.fspath(source), "", 0)
        return
    seen: set[str] = set()
    for path in (os.fspath(one) for one in source):
        name = os.path.basename(path)
        if name in seen:
            raise ConfigError(f"two files are called {name!r}", key=path)
        seen.add(name)
        yield name, path


def _walk(folder: str, prefix: str, depth: int) -> Iterator[tuple[str, str]]:
    """Files below a folder, links followed: a download cache is made of links."""
    if depth > _DEEPEST:
        raise ConfigError(f"more than {_DEEPEST} folders deep: a link leads back?", key=folder)
    try:
        with os.scandir(folder) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise ConfigError(f"cannot list a folder: {describe(error)}", key=folder) from error
    for entry in found:
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            yield from _walk(entry.path, f"{prefix}{entry.name}/", depth + 1)
        else:
            yield prefix + entry.name, entry.path


@contextmanager
def _opened(path: str) -> Iterator[BufferedReader]:
    """A regular file, open; anything else is refused before it can block, and a missing one is named."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ConfigError("not a regular file", key=path)
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise ConfigError(f"cannot read a file: {describe(error)}", key=path) from error


def _read(path: str) -> bytes:
    with _opened(path) as file:
        return file.read()


def _size(path: str) -> int:
    with _opened(path) as file:
        return os.fstat(file.fileno()).st_size


def _digest(path: str) -> str:
    with _opened(path) as file:
        return hashlib.file_digest(file, hashlib.sha256).hexdigest()
