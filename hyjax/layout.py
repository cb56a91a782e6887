"""The layout language: a string with one letter a layer, and the few functions that read, write and fold it.

    layout  = item, item, ...            spaces between items mean nothing
    item    = (letter | "(" layout ")") ["*" count]
    letter  = an ASCII letter or "-"

`"(GGGA)*12"` is 48 layers, `"M*8 A"` is 9. What a letter stands for is `DEFAULT_LETTERS`, unless the config's
legend says otherwise; `kind_of` joins the two.
"""

import re
from collections.abc import Iterable, Mapping
from operator import add

MAX_LAYERS = 10_000

# letter -> (mixer, ffn). None: the layer has no such half. "default": the FFN that is `model.ffn`.
DEFAULT_LETTERS: dict[str, tuple[str | None, str | None]] = {
    "A": ("attention", "default"),
    "W": ("window_attention", "default"),
    "L": ("mla", "default"),
    "G": ("gated_linear_attention", "default"),
    "M": ("mamba2", "default"),
    "S": ("mamba1", "default"),
    "V": ("gla", "default"),
    "N": ("deltanet", "default"),
    "D": ("gated_deltanet", "default"),
    "K": ("kimi_delta_attention", "default"),
    "T": ("lightning_attention", "default"),
    "R": ("rg_lru", "default"),
    "-": (None, "default"),
    "E": (None, "moe"),
}

# A program is a tuple of items: a letter, or (program, repeats).
Item = str | tuple["Program", int]
Program = tuple[Item, ...]


def is_letter(char: str) -> bool:
    """Whether `char` can stand for a layer: one ASCII letter or "-"."""
    return len(char) == 1 and (char == "-" or (char.isascii() and char.isalpha()))


def _error(layout: str, index: int, complaint: str, noun: str = "layout") -> ValueError:
    """`ValueError` that points at the character at `index` (0-based; the text counts from 1)."""
    start = max(0, index - 40)
    shown = "".join(" " if c.isspace() else c for c in layout[start : index + 40])
    text = f"{noun} {layout[:200]!r}: {complaint} (character {index + 1})"
    return ValueError(f"{text}\n    {shown}\n    {' ' * (index - start)}^")


def _read_count(layout: str, star: int) -> tuple[int, int]:
    """Repeat count (at most one too many) after the `*` at index `star`, and the index of what follows it."""
    start = star + 1
    while start < len(layout) and layout[start].isspace():
        start += 1
    end = start
    while end < len(layout) and layout[end] in "0123456789":
        end += 1
    if end == start:
        raise _error(layout, min(start, len(layout) - 1), "'*' must be followed by a whole number, as in G*8")
    digits = layout[start:end].lstrip("0")
    if not digits:
        raise _error(layout, start, "a repeat count must be at least 1")
    return min(int(digits[:9]), MAX_LAYERS + 1), end


def parse(layout: str) -> tuple[str, ...]:
    """`"(GGA)*2"` -> `("G", "G", "A", "G", "G", "A")`, one letter a layer.

    Raises ValueError that points at the character for what the grammar has no place for, a repeat of zero, an
    empty layout or bracket, and more than `MAX_LAYERS` layers.
    """
    if not isinstance(layout, str):
        raise ValueError(f"a layout must be a string such as '(GGGA)*12', not {type(layout).__name__} {layout!r}")
    stack: list[list[str]] = [[]]  # one list of letters for each bracket that is open, the whole layout first
    opened: list[int] = []
    index, repeatable = 0, 0  # repeatable: how many of the letters at the end a "*" here would repeat
    while index < len(layout):
        char = layout[index]
        if is_letter(char):
            stack[-1].append(char)
            index, repeatable = index + 1, 1
        elif char == "(":
            stack.append([])
            opened.append(index)
            index, repeatable = index + 1, 0
        elif char == ")":
            if not opened:
                raise _error(layout, index, "')' closes a bracket that was never opened")
            start, inner = opened.pop(), stack.pop()
            if not inner:
                raise _error(layout, start, "these brackets hold no layer")
            stack[-1].extend(inner)
            index, repeatable = index + 1, len(inner)
        elif char == "*":
            if not repeatable:
                raise _error(layout, index, "'*' must follow a letter or a closing bracket; a repeat can't be repeated")
            count, end = _read_count(layout, index)
            if sum(map(len, stack)) + repeatable * (count - 1) > MAX_LAYERS:
                raise _error(layout, index, f"this repeat makes more than {MAX_LAYERS} layers")
            stack[-1].extend(stack[-1][-repeatable:] * (count - 1))
            index, repeatable = end, 0
        elif char.isspace():
            index += 1
        else:
            raise _error(layout, index, f"{char!r} is neither a letter, '-', a bracket nor a repeat such as '*8'")
    if opened:
        raise _error(layout, opened[-1], "this bracket is never closed")
    if not stack[0]:
        raise ValueError(f"layout {layout!r} is empty: name at least one layer, as in 'GGAG'")
    if len(stack[0]) > MAX_LAYERS:
        raise ValueError(f"a layout may have at most {MAX_LAYERS} layers, this one has {len(stack[0])}")
    return tuple(stack[0])


def kind_of(letter: str, legend: Mapping = {}) -> tuple[str | tuple[str, ...] | None, str | None, dict]:
    """What `letter` stands for: (mixer, ffn, the other fields of its legend entry).

    A legend entry overrides the letter's defaults key by key. A letter with neither raises ValueError.
    """
    entry = dict(legend[letter]) if letter in legend else {}
    if letter not in DEFAULT_LETTERS and "mixer" not in entry and "ffn" not in entry:
        known = " ".join(DEFAULT_LETTERS)
        raise ValueError(f"letter {letter!r} has no default: give legend.{letter} a mixer or use one of {known}")
    mixer, ffn = DEFAULT_LETTERS.get(letter, (None, "default"))
    mixer, ffn = entry.pop("mixer", mixer), entry.pop("ffn", ffn)
    if mixer is None and ffn is None:
        raise ValueError(f"letter {letter!r} is neither mixer nor FFN: give legend.{letter} one of them")
    return mixer, ffn, entry


# ---- placement rules

RULES = ("even", "middle", "first", "last", "every:k")


def place(num_layers: int, attention: int, recurrent: str = "G", where: str = "even") -> str:
    """Layout of `num_layers` layers of which `attention` are "A" and the others `recurrent`.

    even     the runs of recurrent layers before, between and after attention differ by one at most; the
             longer are spread out and the first is one of them: place(4, 1) is "GGAG"
    middle   the attention layers together, as many recurrent layers before as after, or one more
    first    the attention layers before all others
    last     the attention layers after all others
    every:k  attention at layers k, 2k, 3k, ...; their number must be `attention`

    Raises ValueError that names the argument.
    """
    for name, value, low in (("num_layers", num_layers, 1), ("attention", attention, 0)):
        if type(value) is not int or value < low:
            raise ValueError(f"{name} must be a count (int) of at least {low}, not {value!r}")
    if num_layers > MAX_LAYERS:
        raise ValueError(f"num_layers must be at most {MAX_LAYERS}, not {num_layers}")
    if attention > num_layers:
        raise ValueError(f"attention={attention} is more than num_layers={num_layers}: it is a count, no ratio")
    if not isinstance(recurrent, str) or not is_letter(recurrent) or recurrent == "A":
        raise ValueError(f"recurrent must be one layer letter other than 'A', not {recurrent!r}")
    others = num_layers - attention
    if where == "even":
        runs = attention + 1
        short, longer = divmod(others, runs)
        # Run i is one layer longer where i * longer passes a multiple of `runs`; run 0 is, if any.
        return "A".join(recurrent * (short + (i * longer % runs < longer)) for i in range(runs))
    if where == "middle":
        return recurrent * (others - others // 2) + "A" * attention + recurrent * (others // 2)
    if where == "first":
        return "A" * attention + recurrent * others
    if where == "last":
        return recurrent * others + "A" * attention
    return _place_every(num_layers, attention, recurrent, where)


def _place_every(num_layers: int, attention: int, recurrent: str, where: str) -> str:
    """The rule every:k of `place`."""
    match = re.fullmatch(r"every:([0-9]{1,6})", where) if isinstance(where, str) else None
    step = int(match[1]) if match else 0
    if not step:
        raise ValueError(f"where must be one of {', '.join(RULES)} (k a count from 1), not {where!r}")
    count = num_layers // step
    if count != attention:
        fits = [k for k in range(1, num_layers + 2) if num_layers // k == attention]
        instead = f", or every:{min(fits, key=lambda k: abs(k - step))}" if fits else ""
        raise ValueError(
            f"where='every:{step}' puts attention at {count} of {num_layers} layers, not {attention}: "
            f"write attention={count}{instead}"
        )
    return "".join("A" if i % step == 0 else recurrent for i in range(1, num_layers + 1))


# ---- Megatron patterns

# Megatron's symbol -> letter, and the legend entry that makes the letter's layer a mixer with no FFN.
_MEGATRON: dict[str, tuple[str, dict[str, str | None]]] = {
    "M": ("M", {"mixer": "mamba2", "ffn": None}),
    "G": ("D", {"mixer": "gated_deltanet", "ffn": None}),
    "*": ("A", {"mixer": "attention", "ffn": None}),
    "-": ("-", {}),
    "E": ("E", {}),
}


def from_megatron(pattern: str) -> tuple[str, dict[str, dict[str, str | None]]]:
    """`"M-M*-"` -> (layout `"M-MA-"`, its legend): each symbol a layer of its own, mixers without an FFN.

    M Mamba-2, G gated DeltaNet (the letter D here), * attention, - MLP, E MoE. Any other character, pipeline
    separators included, raises ValueError.
    """
    if not isinstance(pattern, str) or not pattern:
        raise ValueError(f"a Megatron pattern must be a string such as 'M-M*-', not {pattern!r}")
    for index, symbol in enumerate(pattern):
        if symbol not in _MEGATRON:
            raise _error(pattern, index, f"{symbol!r} is none of the symbols {' '.join(_MEGATRON)}", "pattern")
    used = [_MEGATRON[symbol] for symbol in _MEGATRON if symbol in pattern]
    legend = {letter: dict(entry) for letter, entry in used if entry}
    return "".join(_MEGATRON[symbol][0] for symbol in pattern), legend


def to_megatron(layout: str, legend: Mapping = {}) -> str:
    """The inverse of `from_megatron`: one symbol a layer. Sizes are no part of a pattern and are left out.

    Raises ValueError for a layer that has no symbol (another mixer, several, a mixer with an FFN), and where
    two letters that differ only in sizes would become one symbol.
    """
    letters = parse(layout)
    meaning: dict[str, tuple[str, dict]] = {}  # symbol -> (letter, its other fields)
    symbols = {}
    for letter in dict.fromkeys(letters):
        where = f"layer {letters.index(letter) + 1}, {letter!r},"
        symbol, fields = _megatron_symbol(where, letter, legend), kind_of(letter, legend)[2]
        symbols[letter] = symbol
        first = meaning.setdefault(symbol, (letter, fields))
        if first[1] != fields:
            raise ValueError(f"{where} would be {symbol!r} like {first[0]!r}, whose fields differ from its own")
    return "".join(symbols[letter] for letter in letters)


def _megatron_symbol(where: str, letter: str, legend: Mapping) -> str:
    """The symbol of `letter`; `where` begins the sentence if there is none."""
    mixer, ffn, _ = kind_of(letter, legend)
    if mixer is None and ffn is not None:
        return "E" if ffn == "moe" else "-"
    for symbol, (_, entry) in _MEGATRON.items():
        if entry and entry["mixer"] == mixer:
            if ffn is None:
                return symbol
            raise ValueError(f"{where} has an FFN, which is a layer of its own there: set legend.{letter}.ffn=None")
    raise ValueError(f"{where} has mixer {mixer!r} and FFN {ffn!r}, for which there is no Megatron symbol")


# ---- programs


def period(letters: str) -> int:
    """Length of the shortest string of which `letters` is a whole number of copies."""
    return (letters + letters).find(letters, 1)


# Past this many letters a layout is folded piece by piece, to bound the cubic time.
_FOLD_AT_ONCE = 256


def program(letters: Iterable[str]) -> Program:
    """Nested program of runs and periods that traces the fewest letters, then has the fewest loops.

    `GGAGGGAG` -> `((((("G",), 2), "A", "G"), 2),)`: twice (G twice, A, G), 3 letters traced for 8 layers.

    An interval dynamic programme: the cost of letters i..j-1 is the least of all splits in two and, where the
    interval is some unit repeated, of the unit as a loop. Cubic in the letters of one period of the layout.
    """
    text = "".join(letters)
    if not text:
        return ()
    unit = period(text)
    if unit < len(text):
        return ((program(text[:unit]), len(text) // unit),)
    if len(text) > _FOLD_AT_ONCE:
        return program(text[:_FOLD_AT_ONCE]) + program(text[_FOLD_AT_ONCE:])
    n = len(text)
    letter_cost = n + 1  # there are at most n - 1 loops, so loops only break ties between equal numbers of letters
    # cost by start then end, and by end then start, so that a split is one pass over two contiguous slices
    ahead = [[0] * (n + 1) for _ in range(n + 1)]
    behind = [[0] * (n + 1) for _ in range(n + 1)]
    choice: dict[tuple[int, int], int] = {}  # > 0: split at this index; < 0: a loop over a unit of this length
    for size in range(1, n + 1):
        for i in range(n - size + 1):
            j = i + size
            if size == 1:
                ahead[i][j] = behind[j][i] = letter_cost
                continue
            sums = list(map(add, ahead[i][i + 1 : j], behind[j][i + 1 : j]))
            least = min(sums)
            choice[i, j] = i + 1 + sums.index(least)
            unit = period(text[i:j])
            if unit < size and ahead[i][i + unit] + 1 < least:
                least, choice[i, j] = ahead[i][i + unit] + 1, -unit
            ahead[i][j] = behind[j][i] = least
    return _build(text, choice, 0, n)


def _build(text: str, choice: Mapping[tuple[int, int], int], i: int, j: int) -> Program:
    """The program that `choice` holds for letters i..j-1 (splits in a loop: they may chain n deep)."""
    items: list[Item] = []
    pending = [(i, j)]
    while pending:
        i, j = pending.pop()
        if j - i == 1:
            items.append(text[i])
        elif choice[i, j] > 0:
            pending += [(choice[i, j], j), (i, choice[i, j])]
        else:
            unit = -choice[i, j]
            items.append((_build(text, choice, i, i + unit), (j - i) // unit))
    return tuple(items)


def expand(items: Program) -> str:
    """The letters that a program stands for: the inverse of `program`."""
    return "".join(item if isinstance(item, str) else expand(item[0]) * item[1] for item in items)


def traced(items: Program) -> int:
    """Number of letters in a program, each of which is traced once."""
    return sum(1 if isinstance(item, str) else traced(item[0]) for item in items)
