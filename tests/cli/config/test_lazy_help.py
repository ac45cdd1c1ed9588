"""Python 3.14's argparse formats help texts as options are added.

Hydra gives objects in their place.
"""

import argparse

import pytest

from lightning_unified.cli.train import accept_lazy_help


class Container:
    """A parser's base class as in Python 3.14."""

    def _check_help(self, action):
        raise ValueError("badly formed help string")


def option(text):
    return argparse.Action(["--version"], "version", help=text)


def test_help_that_is_no_text_is_accepted_and_text_is_still_checked():
    class Own(Container):
        pass

    accept_lazy_help(Own)
    accept_lazy_help(Own)

    Own()._check_help(option(object()))
    Own()._check_help(option(None))
    with pytest.raises(ValueError, match="badly formed"):
        Own()._check_help(option("%(nothing)s"))


def test_a_parser_of_earlier_versions_is_left_as_it_is():
    class Plain:
        pass

    accept_lazy_help(Plain)
    assert not hasattr(Plain, "_check_help")
