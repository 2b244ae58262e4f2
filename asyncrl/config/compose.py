"""From the command line to a validated :class:`Config`, by way of Hydra groups under ``configs/``.

The schema is the one source of defaults: it is stored as Hydra's node ``schema``, and the files of a group
hold only what differs from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from asyncrl.config.effects import check_effects
from asyncrl.config.engine_options import check_engine_options
from asyncrl.config.layout import Layout, check_layout
from asyncrl.config.names import check_name
from asyncrl.config.network import check_network
from asyncrl.config.refusals import check_values, refuse_value
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError

__all__ = ["compose", "config_folder", "override", "to_yaml"]


def compose(overrides: Sequence[str]) -> Config:
    """Composes and checks a configuration.

    Args:
        overrides: Hydra overrides such as ``recipe=tiny`` or ``queue.max_staleness=4``.

    Raises:
        ConfigError: unknown group, choice or option (with the nearest name), a value out of range, or one without effect.

    Example:
        >>> compose(["recipe=tiny", "queue.max_staleness=4"]).queue.max_staleness
        4
    """
    written, chosen = _check_overrides(overrides)
    config = validate(_merge(overrides, chosen))
    check_effects(config, written)
    return config


def _merge(overrides: Sequence[str], chosen: dict[str, str]) -> Any:
    """Schema, then groups, then the recipe, then the groups that the user named, then single options."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    ConfigStore.instance().store(name="schema", node=Config().model_dump(), package="_global_")
    try:
        with initialize_config_dir(str(config_folder()), version_base="1.3"):
            composed = hydra_compose("config", overrides=list(overrides))
            named = [_group_file(group, choice) for group, choice in chosen.items() if group != "recipe"]
            single = OmegaConf.from_dotlist([text for text in overrides if text.partition("=")[0] not in chosen])
            return OmegaConf.to_container(OmegaConf.merge(composed, *named, single), resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"the options do not compose: {str(error).splitlines()[0]}") from error


def _group_file(group: str, choice: str) -> Any:
    from omegaconf import OmegaConf

    file = config_folder() / group / f"{choice}.yaml"
    body = OmegaConf.load(file)
    return body if file.read_text().startswith("# @package _global_") else OmegaConf.create({group: body})


def override(config: Config, overrides: Sequence[str]) -> Config:
    """A configuration with some options replaced; groups are not composed again.

    Raises:
        ConfigError: as for :func:`compose`.
    """
    from omegaconf import OmegaConf

    for text in overrides:
        check_name(text.partition("=")[0])
    values = OmegaConf.to_container(OmegaConf.merge(config.model_dump(), OmegaConf.from_dotlist(list(overrides))))
    changed = validate(values)
    check_effects(changed, [text.partition("=")[0] for text in overrides])
    return changed


def validate(values: Any) -> Config:
    """Checks types and ranges.

    Raises:
        UnsupportedError: a value or a combination that is refused on purpose.
        ConfigError: one line for each option that is wrong: name, rule, value met; or ranks that cannot be laid out.
    """
    check_values(values)
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        lines = [
            f"{'.'.join(str(part) for part in item['loc'])}: {item['msg'][:1].lower()}{item['msg'][1:]}; met {item['input']!r}"
            for item in error.errors()
        ]
        raise ConfigError("; ".join(lines)) from error
    check_network(config.queue)
    check_engine_options(config.learner)
    check_layout(Layout.of(config.learner))
    if not config.queue.keys:
        return config
    keys = str(Path(config.queue.keys).expanduser().absolute())  # processes of the run may work elsewhere
    return config.model_copy(update={"queue": config.queue.model_copy(update={"keys": keys})})


def to_yaml(config: Config) -> str:
    """The resolved configuration as YAML."""
    from omegaconf import OmegaConf

    return str(OmegaConf.to_yaml(OmegaConf.create(config.model_dump())))


def config_folder() -> Path:
    """Where the Hydra groups lie: in the installed package, or in the checkout beside it."""
    here = Path(__file__).resolve().parent.parent
    for folder in (here / "_configs", here.parent / "configs"):
        if (folder / "config.yaml").is_file():
            return folder
    raise ConfigError(f"the configs folder is missing beside {here}; install asyncrl again")


def _check_overrides(overrides: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Checks names before Hydra does, for its errors do not name the nearest; returns options written and groups chosen."""
    folder = config_folder()
    written: list[str] = []
    chosen: dict[str, str] = {}
    groups = {p.name: sorted(f.stem for f in p.glob("*.yaml")) for p in folder.iterdir() if p.is_dir()}
    for text in overrides:
        name, equals, value = text.partition("=")
        if not equals or name[:1] in "+~" or "@" in name:
            raise ConfigError(f"an option is written name=value; met {text!r}")
        if name in groups:
            if value not in groups[name]:
                refuse_value(f"{name}.engine", value)
                raise ConfigError(f"{name} is one of {', '.join(c for c in groups[name] if c != 'none')}; met {value!r}")
            chosen[name] = value
        else:
            check_name(name)
            written.append(name)
    return written, chosen
