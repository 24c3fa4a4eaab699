"""The configurations that come with the package."""

import os
from pathlib import Path

import finetune
from finetune.config.starter import write_new_file
from finetune.errors import ConfigurationInvalid


def recipes_folder() -> Path:
    """Return where the recipes are: inside an installed package, beside a checkout's."""
    package = Path(finetune.__file__).parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def find_recipe(name: str) -> Path:
    """Return a path if there is such a file, else the file of the recipe of that name.

    Raises:
        ConfigurationInvalid: If there is neither.
    """
    path = Path(name)
    if os.path.exists(path) and not os.path.isdir(path):  # a file, or a pipe such as /dev/stdin
        return path
    names = sorted(one.stem for one in recipes_folder().glob("*.yaml"))
    is_a_name = path.parent in (Path(), Path("configs")) and path.suffix in ("", ".yaml")
    if is_a_name and path.stem in names:
        return recipes_folder() / f"{path.stem}.yaml"
    raise ConfigurationInvalid(
        f"there is no configuration file {name}",
        remedy=f"name a YAML file, or one of the recipes {', '.join(names)}",
    )


def describe_recipes() -> dict[str, str]:
    """Return the first comment line of every recipe, by the recipe's name."""
    return {
        path.stem: path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        for path in sorted(recipes_folder().glob("*.yaml"))
    }


def copy_recipe(name: str, *, to: Path) -> None:
    """Copy a recipe to a new file.

    Raises:
        ConfigurationInvalid: If there is no recipe of that name.
        UsageError: If the file can't be written, or is there already.
    """
    if name not in (names := describe_recipes()):
        remedy = f"take one of {', '.join(names)}"
        raise ConfigurationInvalid(f"there is no recipe {name}", remedy=remedy)
    write_new_file(to, (recipes_folder() / f"{name}.yaml").read_text(encoding="utf-8"))
