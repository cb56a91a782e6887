"""What a corpus is to be made of: all that it depends on, written into its folder and compared by a later try."""

from dataclasses import asdict, dataclass
from typing import Any

from hyjax.config.errors import show
from hyjax.data.inputs import Input
from hyjax.data.readers import Options
from hyjax.data.tokenizers import FileTokenizer, Tokenizer


@dataclass(frozen=True)
class Request:
    """Of a corpus; `shard_bytes` 0 leaves the size of its shards to that of the whole."""

    tokenizer: Tokenizer
    options: Options
    shard_bytes: int
    inputs: list[Input]

    def to_json(self) -> dict[str, Any]:
        """The manifest's account of it, which a later try is compared with."""
        eos_token = self.tokenizer.eos_token if isinstance(self.tokenizer, FileTokenizer) else ""
        tokenizer = self.tokenizer.identity | {"vocab_size": self.tokenizer.vocab_size, "eos_token": eos_token}
        options = {
            "field": self.options.field,
            "separator": self.options.separator.decode("utf-8", "surrogateescape"),
            "shard_bytes": self.shard_bytes,
        }
        return {"tokenizer": tokenizer, "options": options, "inputs": [asdict(item) for item in self.inputs]}


def compare(old: dict[str, Any], new: dict[str, Any], what: str) -> None:
    """ValueError with one sentence that begins with `what` where the two requests, as JSON, differ."""
    difference = _difference(old, new)
    if difference:
        raise ValueError(f"{what} {difference}: use another --out, or remove that folder")


def _difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    """What was asked for otherwise; empty where nothing was."""
    for part, other in (("tokenizer", "another tokenizer"), ("options", "other options")):
        for key, was in old[part].items():
            if was != new[part][key]:
                return f"with {other} ({key} {show(was)}, now {show(new[part][key])})"
    was, now = ({item["name"]: item for item in side["inputs"]} for side in (old, new))
    for name in (*was, *now):
        if name not in was or name not in now:
            return f"from other inputs ({name} {'is new' if name in now else 'is no longer among them'})"
        for key, value in was[name].items():
            if value != now[name][key]:
                return f"from other inputs ({name} has {key} {value!r}, now {now[name][key]!r})"
    return ""
