"""The one table of actions, and what is made of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dsprobe.tui.actions import ACTIONS, as_markdown, by_key, keys_of, matching, on_screen, where
from dsprobe.tui.glyphs import ASCII, BLOCKS
from dsprobe.tui.lines import text_of
from dsprobe.tui.pages import help_page
from dsprobe.tui.prompt import Prompt, prompt_lines

SCREENS = [a.id for a in ACTIONS if a.group == "Screens"]


@pytest.mark.parametrize("screen", SCREENS)
def test_no_key_means_two_things(screen: str) -> None:
    everywhere = [key for a in ACTIONS if not a.screens for key in a.keys]
    own = [key for a in on_screen(screen) if a.screens for key in a.keys]
    assert len(everywhere) == len(set(everywhere))
    assert len(own) == len(set(own))
    assert len({a.id for a in ACTIONS}) == len(ACTIONS)
    assert by_key(screen)["q"].id == by_key(screen)["ctrl+c"].id == "quit"


@pytest.mark.parametrize("screen", SCREENS)
def test_time_moves_by_the_same_keys_everywhere(screen: str) -> None:
    """Arrows open and close rows where there are some to open."""
    lanes, here = by_key("lanes"), by_key(screen)
    for key, action in lanes.items():
        if action.group != "Rows" and key not in ("left", "right"):
            assert here[key] is action


def test_the_keys_of_the_field_are_there() -> None:
    wanted = {
        "q": "quit", "?": "help", "space": "pause", "/": "filter", ":": "palette", "h": "back",
        "j": "down", "k": "up", "l": "forward", "+": "zoom_in", "-": "zoom_out", "[": "back",
        "]": "forward", "t": "step", "T": "step_back", "<": "slower", ">": "faster",
        "r": "reverse", "b": "jump", "g": "start", "G": "end", "m": "mark", "s": "save",
        "ctrl+l": "repaint", "left": "back", "shift+left": "far_back",
    }  # fmt: skip
    assert {key: by_key("lanes")[key].id for key in wanted} == wanted


def test_help_and_documentation_name_every_action_and_key() -> None:
    page = "\n".join(text_of(line) for line in help_page(BLOCKS, 100))
    markdown = as_markdown()
    for action in ACTIONS:
        assert action.title + where(action) in page
        assert keys_of(action) in page
        assert action.title + where(action) in markdown
    assert all(text_of(x).isascii() for x in help_page(ASCII, 100))


def test_the_palette_finds_by_words_in_any_order() -> None:
    assert [a.id for a in matching("columns longer", "lanes")] == ["zoom_out"]
    assert matching("", "memory") == on_screen("memory")
    assert matching("no such thing", "lanes") == []


def test_the_prompt_edits_a_line() -> None:
    prompt = Prompt("jump", "lanes")
    for key in "14:03x":
        assert prompt.key(key, key) == "open"
    prompt.key("backspace", None)
    assert prompt.text == "14:03"
    prompt.key("left", None)
    prompt.key("ctrl+u", "\x15")
    assert prompt.text == ""
    prompt.insert("a b\nc" + "x" * 5000)
    assert prompt.text.startswith("a b c")
    assert len(prompt.text) == 1024
    prompt.key("ctrl+w", "\x17")
    assert prompt.text == "a b"
    assert prompt.key("enter", "\r") == "done"
    assert prompt.key("escape", "\x1b") == "cancel"
    assert Prompt("jump", "lanes").key("backspace", None) == "cancel"


def test_the_palette_keeps_its_choice_in_range_and_in_view() -> None:
    prompt = Prompt("palette", "lanes")
    for _ in range(100):
        prompt.key("down", None)
    assert prompt.picked() is ACTIONS[-1]
    shown = [text_of(line) for line in prompt_lines(prompt, BLOCKS, 80, 24)]
    assert any(ACTIONS[-1].title in line and ">" in line for line in shown)
    for letter in "zoom":
        prompt.key(letter, letter)
    assert prompt.picked() in matching("zoom", "lanes") or prompt.picked() is None
    for height in (1, 2, 5, 100):
        assert len(prompt_lines(prompt, BLOCKS, 80, height)) <= max(height, 1)


def test_the_documentation_has_the_keys_of_today() -> None:
    """``DSPROBE_GOLDEN=write`` brings it up to date."""
    page = Path(__file__).parents[2] / "docs" / "screen.md"
    before, start, rest = page.read_text(encoding="utf-8").partition("<!-- keys -->\n")
    _, end, after = rest.partition("<!-- /keys -->")
    wanted = before + start + as_markdown() + end + after
    if os.environ.get("DSPROBE_GOLDEN") == "write":
        page.write_text(wanted, encoding="utf-8")
    assert page.read_text(encoding="utf-8") == wanted
