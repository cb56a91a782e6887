"""What the sub-commands share: a parser with helpful errors, and loading a config with its overrides."""

from __future__ import annotations

import argparse
import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from hyjax.config.errors import near

if TYPE_CHECKING:
    from ml_collections import FrozenConfigDict

CONFIG_HELP = "a config file and, after a colon, its argument; --config.KEY=VALUE (any number) changes a key"


class UserError(ValueError):
    """Something on the command line is wrong: one sentence."""


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations, whose errors are `UserError` and name what an unknown word is near."""

    def __init__(self, **options: Any):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        choice = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)
        hint = near(choice[1], re.findall(r"[\w-]+", choice[2])) if choice else ""
        raise UserError(f"{message}{hint} (see {self.prog} --help)")

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """The arguments. An unknown flag is reported before a missing one: it may be that one, misspelled."""
        flags = self._option_string_actions
        for word in argv:
            name = re.split(r"[=.]", word)[0]
            if name.startswith("-") and name not in flags and not re.fullmatch(r"-\d*", name):
                hint = near(name, flags)
                raise UserError(f"{self.prog} has no flag {name}{hint} (see {self.prog} --help)")
        return self.parse_args(argv)


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """(what argparse reads, the `--config.KEY=VALUE` overrides), each in order; a value may be a word of its own."""
    rest: list[str] = []
    overrides: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        if not re.match(r"--?(no)?config\.", word):
            rest.append(word)
            continue
        overrides.append(word)
        if "=" not in word and words and not words[0].startswith("--"):
            overrides.append(words.pop(0))
    return rest, overrides


def load_config(spec: str, overrides: Sequence[str]) -> FrozenConfigDict:
    """The config, of which the model's parts have been built: what only they know is wrong with it is said here."""
    from hyjax import config as configs

    config = configs.load(spec, overrides)
    from hyjax.models import HybridLM

    with user_facing():
        HybridLM(config.model)  # does no array work, so a job may still choose its devices
    return config


@contextlib.contextmanager
def user_facing() -> Iterator[None]:
    """What raises ValueError in here is something that a person gave, not a fault of the code."""
    try:
        yield
    except ValueError as error:
        raise UserError(str(error)) from error


def positive(text: str) -> int:
    """An argument's type: a whole number from 1 up."""
    if not re.fullmatch(r"\d+", text) or not 0 < int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 to 2**31 - 1, not {text!r}")
    return int(text)
