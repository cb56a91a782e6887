"""The layout language: parsing, placement rules, Megatron patterns, and the program of runs and periods."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyjax import layout
from hyjax.layout import (
    DEFAULT_LETTERS,
    expand,
    from_megatron,
    kind_of,
    parse,
    period,
    place,
    program,
    to_megatron,
    traced,
)

LETTERS = st.sampled_from([*DEFAULT_LETTERS, "a", "Z"])


@st.composite
def spelled(draw, depth=3):
    """(layout text, the letters that it stands for), built from the grammar."""
    text, letters = "", ""
    for _ in range(draw(st.integers(1, 3))):
        if depth and draw(st.booleans()):
            inner, unit = draw(spelled(depth - 1))
            inner = f"({inner})"
        else:
            inner = unit = draw(LETTERS)
        count = draw(st.integers(1, 4))
        space, star = draw(st.sampled_from(["", " ", "  "])), draw(st.sampled_from(["*", " * ", "* 0"]))
        text += inner + space + (f"{star}{count}" if count > 1 or draw(st.booleans()) else "")
        letters += unit * count
    return text, letters


@given(spelled())
def test_parse_agrees_with_the_grammar(case):
    text, letters = case
    assert parse(text) == tuple(letters)
    assert parse(letters) == tuple(letters)


def test_parse_examples():
    assert parse("GGAG") == ("G", "G", "A", "G")
    assert "".join(parse("(GGGA)*12")) == "GGGA" * 12
    assert "".join(parse("M*8 A")) == "MMMMMMMMA"
    assert "".join(parse("((G*2 A)*2 -)*2")) == "GGAGGA-GGAGGA-"
    assert len(parse("G*10000")) == 10_000


@pytest.mark.parametrize(
    ("text", "character", "fragment"),
    [
        ("GG(AG", 3, "never closed"),
        ("(GG", 1, "never closed"),
        ("GGA)G", 4, "never opened"),
        ("GG()A", 3, "hold no layer"),
        ("GG( )A", 3, "hold no layer"),
        ("G*0", 3, "at least 1"),
        ("G*00 A", 3, "at least 1"),
        ("G*A", 3, "whole number"),
        ("G*", 2, "whole number"),
        ("G*-3", 3, "whole number"),
        ("*3", 1, "must follow"),
        ("(*3)", 2, "must follow"),
        ("G*2*3", 4, "can't be repeated"),
        ("GG3", 3, "'3'"),
        ("G|A", 2, "'|'"),
        ("GéA", 2, "'é'"),
        ("G*²", 3, "whole number"),
        ("GGA_", 4, "'_'"),
        ("G*10001", 2, "more than 10000"),
        ("G*9999999999999", 2, "more than 10000"),
        ("((G*1000)*1000)*1000", 10, "more than 10000"),
        ("G*10000A*2", 9, "more than 10000"),
    ],
)
def test_refusals_point_at_the_character(text, character, fragment):
    with pytest.raises(ValueError, match=r"layout") as caught:
        parse(text)
    sentence, shown, caret = str(caught.value).split("\n")
    assert fragment in sentence and f"(character {character})" in sentence and repr(text) in sentence
    assert shown[caret.index("^")] == text[character - 1]


@pytest.mark.parametrize("text", ["", "   ", "G" * 10_001, None, 3, ["G", "A"]])
def test_refusals_of_the_whole(text):
    with pytest.raises(ValueError, match="layout"):
        parse(text)


@given(st.text(alphabet="GA-*()0123 é|", max_size=30))
def test_any_text_is_read_or_refused(text):
    try:
        letters = parse(text)
    except ValueError:
        return
    assert letters and all(layout.is_letter(letter) for letter in letters)


def test_a_long_mistake_is_shown_in_part():
    with pytest.raises(ValueError) as caught:
        parse("G" * 500 + "?" + "A" * 500)
    _, shown, caret = str(caught.value).split("\n")
    assert len(shown) < 100 and shown[caret.index("^")] == "?"


COUNTS = st.integers(1, 200).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n)))


@given(COUNTS, st.sampled_from(["even", "middle", "first", "last"]), st.sampled_from("GMD-"))
def test_place_counts(counts, where, recurrent):
    num_layers, attention = counts
    text = place(num_layers, attention, recurrent, where)
    assert "".join(parse(text)) == text
    assert len(text) == num_layers and text.count("A") == attention
    assert text.count(recurrent) == num_layers - attention


@given(COUNTS)
def test_place_even(counts):
    num_layers, attention = counts
    text = place(num_layers, attention)
    gaps = [len(gap) for gap in text.split("A")]
    assert max(gaps) - min(gaps) <= 1
    assert text[0] == ("G" if attention < num_layers else "A")
    # the longer gaps are spread out too: any stretch of gaps holds its share of layers, to within one
    sums = [sum(gaps[i : i + 4]) for i in range(len(gaps) - 3)]
    assert not sums or max(sums) - min(sums) <= 1


@given(COUNTS)
def test_place_blocks(counts):
    num_layers, attention = counts
    middle, others = place(num_layers, attention, where="middle"), num_layers - attention
    assert middle == "G" * ((others + 1) // 2) + "A" * attention + "G" * (others // 2)
    assert place(num_layers, attention, where="first") == "A" * attention + "G" * others
    assert place(num_layers, attention, where="last") == "G" * others + "A" * attention


@given(st.integers(1, 100), st.integers(1, 120))
def test_place_every(num_layers, step):
    text = place(num_layers, num_layers // step, where=f"every:{step}")
    assert [i for i, c in enumerate(text, 1) if c == "A"] == list(range(step, num_layers + 1, step))


def test_place_examples():
    assert place(4, 1) == "GGAG"
    assert place(12, 3, where="every:4") == "GGGA" * 3
    assert place(5, 2) == "GAGAG"
    assert place(1, 0) == "G" and place(1, 1) == "A" and place(3, 3) == "AAA" and place(3, 0) == "GGG"
    assert place(6, 1, "M", "middle") == "MMMAMM"


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        ((0, 0), "num_layers must be a count (int) of at least 1, not 0"),
        ((10_001, 1), "at most 10000"),
        ((4, 5), "attention=5 is more than num_layers=4"),
        ((4, -1), "attention must be"),
        ((4, 0.25), "attention must be a count (int)"),
        ((4, True), "attention must be a count (int)"),
        ((4, 1, "GM"), "recurrent"),
        ((4, 1, "A"), "recurrent"),
        ((4, 1, "*"), "recurrent"),
        ((4, 1, "G", "centre"), "even, middle, first, last, every:k"),
        ((4, 1, "G", "every:0"), "every:k"),
        ((4, 1, "G", "every:x"), "every:k"),
        ((4, 1, "G", None), "every:k"),
        ((12, 2, "G", "every:4"), "puts attention at 3 of 12 layers, not 2: write attention=3, or every:5"),
        ((12, 0, "G", "every:4"), "write attention=3, or every:13"),
        ((12, 5, "G", "every:4"), "write attention=3"),
    ],
)
def test_place_refuses(arguments, fragment):
    with pytest.raises(ValueError) as caught:
        place(*arguments)
    assert fragment in str(caught.value)


@given(st.text(alphabet="MG*-E", min_size=1, max_size=60))
def test_megatron_round_trip(pattern):
    text, legend = from_megatron(pattern)
    assert to_megatron(text, legend) == pattern
    assert len(parse(text)) == len(pattern)
    for letter, symbol in zip(text, pattern, strict=True):
        mixer, ffn, fields = kind_of(letter, legend)
        assert (mixer is None) == (symbol in "-E") and (ffn is None) == (symbol in "MG*") and not fields
    assert from_megatron(to_megatron(text, legend)) == (text, legend)


def test_megatron_examples():
    text, legend = from_megatron("M-M*G")
    assert text == "M-MAD"
    assert legend == {
        "M": {"mixer": "mamba2", "ffn": None},
        "D": {"mixer": "gated_deltanet", "ffn": None},
        "A": {"mixer": "attention", "ffn": None},
    }
    own = {
        "x": {"mixer": "mamba2", "ffn": None},
        "A": {"ffn": None, "kv_heads": 2},
        "f": {"mixer": None, "ffn": "gelu"},
    }
    assert to_megatron("(xf)*2 A", own) == "M-M-*"


@pytest.mark.parametrize(
    ("text", "legend", "fragment"),
    [
        ("MA", {}, "layer 1, 'M', has an FFN"),
        ("-W", {"W": {"ffn": None}}, "layer 2, 'W', has mixer 'window_attention'"),
        ("--V", {"V": {"ffn": None}}, "layer 3"),
        ("H", {"H": {"mixer": ("attention", "mamba2"), "ffn": None}}, "no Megatron symbol"),
        ("-", {"-": {"ffn": None}}, "'-' is neither mixer nor FFN"),
        (
            "AB",
            {"A": {"ffn": None}, "B": {"mixer": "attention", "ffn": None, "heads": 2}},
            "whose fields differ",
        ),
        ("AZ", {"A": {"ffn": None}}, "letter 'Z' has no default"),
    ],
)
def test_to_megatron_refuses(text, legend, fragment):
    with pytest.raises(ValueError) as caught:
        to_megatron(text, legend)
    assert fragment in str(caught.value)


@pytest.mark.parametrize("pattern", ["", "M|M", "M-M/M", "MA", "M M", "m", None, 3])
def test_from_megatron_refuses(pattern):
    with pytest.raises(ValueError, match="pattern"):
        from_megatron(pattern)


def test_kind_of():
    assert kind_of("A") == ("attention", "default", {})
    assert kind_of("E") == (None, "moe", {})
    assert kind_of("A", {"A": {"ffn": "gelu", "heads": 2}}) == ("attention", "gelu", {"heads": 2})
    assert kind_of("x", {"x": {"mixer": "mamba2"}}) == ("mamba2", "default", {})
    with pytest.raises(ValueError, match=r"legend\.x"):
        kind_of("x", {"x": {"heads": 2}})


def fewest(letters, known):
    """Letters traced by the best program, by plain recursion over all splits and all units."""
    if letters not in known:
        n = len(letters)
        sizes = [n] if n == 1 else [fewest(letters[:i], known) + fewest(letters[i:], known) for i in range(1, n)]
        units = [u for u in range(1, n) if letters[:u] * (n // u) == letters]
        known[letters] = min(sizes + [fewest(letters[:u], known) for u in units])
    return known[letters]


@settings(max_examples=200)
@given(st.text(alphabet="GAM", min_size=1, max_size=12), st.integers(1, 5))
def test_program_is_the_least(letters, repeats):
    items = program(letters)
    assert expand(items) == letters
    assert traced(items) == fewest(letters, {})
    longer = program(letters * repeats)
    assert expand(longer) == letters * repeats and traced(longer) <= traced(items)


def test_program_examples():
    assert program(("G",)) == ("G",)
    assert program("GGGG") == ((("G",), 4),)
    assert program("GGAG" * 12) == ((((("G",), 2), "A", "G"), 12),)
    assert program("GMA") == ("G", "M", "A")
    assert [period(text) for text in ("G", "GGGG", "GAGA", "GAGAG")] == [1, 1, 2, 5]
    # 52 layers with no period of their own
    pattern = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
    assert traced(program(from_megatron(pattern)[0])) <= 12


def test_program_is_fast_without_repeats():
    # the Thue-Morse word repeats nothing three times; the letters of a prime count have no period
    letters = "".join("GA"[bin(i).count("1") % 2] for i in range(127))
    start = time.perf_counter()
    items = program(letters)
    assert time.perf_counter() - start < 1
    assert expand(items) == letters and traced(items) < 127
    huge = "".join("GAM"[(i * i * i + i // 7) % 3] for i in range(800)) + "A"
    assert expand(program(huge)) == huge
