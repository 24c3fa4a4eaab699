"""The configurations that come with the package."""

from pathlib import Path

import finetune
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
    if path.is_file():
        return path
    shipped = recipes_folder() / f"{path.stem}.yaml"
    if path.parent in (Path(), Path("configs")) and shipped.is_file():
        return shipped
    names = ", ".join(sorted(one.stem for one in recipes_folder().glob("*.yaml")))
    raise ConfigurationInvalid(
        f"there is no configuration file {name}",
        remedy=f"name a YAML file, or one of the recipes that come with the package: {names}",
    )
