"""Find the configs that come with the package."""

from __future__ import annotations

import difflib
import tomllib
from importlib.resources import files
from pathlib import Path

from oarjax.errors import ConfigError


def shipped_configs() -> dict[str, Path]:
    """Return the shipped configs by name: those of the package, or in a checkout those beside its pyproject.toml."""
    package = Path(str(files("oarjax")))
    folder, project = package / "configs", package.parent / "pyproject.toml"
    if not folder.is_dir() and project.is_file():
        name = tomllib.loads(project.read_text(encoding="utf-8")).get("project", {}).get("name")
        folder = package.parent / "configs" if name == "oarjax" else folder
    return {file.stem: file for file in sorted(folder.glob("*.yaml"))}


def shipped_config(path: Path) -> Path:
    name, inside = path.name.removesuffix(".yaml"), path.parent in (Path(), Path("configs"))
    shipped = shipped_configs()
    if inside and name in shipped:
        return shipped[name]
    if path.is_dir():
        config = path / "config.yaml"
        hint = (
            f"a run's own config is {config}"
            if config.is_file()
            else "expected a YAML file or the name of a shipped one"
        )
        raise ConfigError(f"config {path}: a folder; {hint}")
    siblings = sorted(map(str, path.parent.glob("*.yaml")))
    nearest = difflib.get_close_matches(str(path), siblings, n=1) or difflib.get_close_matches(name, shipped, n=1)
    hint = f"did you mean {nearest[0]}? " if nearest else ""
    files_here = f"files here: {', '.join(siblings[:10])}; " if siblings else ""
    raise ConfigError(f"config {path}: no such file; {hint}{files_here}shipped ones: {', '.join(shipped) or 'none'}")


def copy_shipped(name: str, target: Path | None = None) -> Path:
    """Copy a shipped config to ``target`` (NAME.yaml here) and return where it is.

    Raises:
        ConfigError: no such config; the target exists or cannot be written.
    """
    source = shipped_config(Path(name))
    target = target or Path(source.name)
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(source.read_text(encoding="utf-8"))
    except FileExistsError:
        raise ConfigError(f"init: {target} exists; give another file, or remove it") from None
    except OSError as error:
        raise ConfigError(f"init: {target} cannot be written: {error.strerror}; give another file") from error
    return target
