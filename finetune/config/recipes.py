"""The configurations that come with the package."""

import os
from pathlib import Path

import finetune
from finetune.config.starter import write_new_file
from finetune.errors import ConfigurationInvalid

PACKAGE_FOLDER = Path(finetune.__file__).parent


def recipes_folder() -> Path:
    """Return where the recipes are: inside an installed package, beside a checkout's."""
    installed = PACKAGE_FOLDER / "configs"
    return installed if installed.is_dir() else PACKAGE_FOLDER.parent / "configs"


def find_recipe(name: str) -> Path:
    """Return the file of a configuration, given as a path or as a recipe's name.

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
    names = describe_recipes()
    if name not in names:
        raise ConfigurationInvalid(
            f"there is no recipe {name}", remedy=f"take one of {', '.join(names)}"
        )
    write_new_file(to, (recipes_folder() / f"{name}.yaml").read_text(encoding="utf-8"))
