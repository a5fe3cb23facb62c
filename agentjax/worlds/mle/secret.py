"""A run's secret: generated labels depend on it and on the seed, so that code in a box cannot
generate them.

The seed of a data set is a small number and its generator is public. Where a policy runs programs,
it could run the generator too. So labels also depend on 32 random bytes that are in the world's
folder of the run (mode 600) and never enter a box. A run that is resumed, replayed, evaluated or
scored again reads them from there.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import secrets

from agentjax.config import ConfigError

FILE = "secret"
_BYTES = 32


def read_secret(path: str | os.PathLike[str]) -> bytes:
  """The secret in a file, 64 hexadecimal digits.

  Raises:
    ConfigError: no such file, or another content.
  """
  try:
    value = bytes.fromhex(pathlib.Path(path).read_text(encoding="ascii").strip())
  except (OSError, ValueError) as error:
    raise ConfigError(f"no secret can be read from {path}: {error}") from error
  if len(value) != _BYTES:
    raise ConfigError(f"{path} holds {len(value)} bytes; a secret has {_BYTES}, as hex digits")
  return value


def run_secret(folder: pathlib.Path) -> bytes:
  """The secret of the run whose world has ``folder``, drawn at its beginning.

  Raises:
    ConfigError: a run that was begun without one.
  """
  path, directory = folder / FILE, folder.parent
  if not path.exists():
    if (directory / "journal.log").exists():
      raise ConfigError(
        f"{directory} holds a run whose generated labels depended on the seed alone, so that a "
        "policy could compute them. Begin it anew in another --workdir."
      )
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / f".{FILE}-{secrets.token_hex(8)}"
    with os.fdopen(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
      file.write(secrets.token_hex(_BYTES))
    with contextlib.suppress(FileExistsError):  # another process of the run was first
      os.link(made, path)
    made.unlink()
  return read_secret(path)
