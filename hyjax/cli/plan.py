"""`hyjax plan`: what a model costs, from its config alone."""

from __future__ import annotations

import json
from collections.abc import Sequence

from hyjax.cli.parser import CONFIG_HELP, Parser, load_config, positive, split_overrides, user_facing


def plan(argv: Sequence[str]) -> int:
    """Print what a model costs: parameters, FLOPs, decode state."""
    parser = Parser(
        prog="hyjax plan",
        description="Print what a model costs, from its config alone: parameters, FLOPs per token, decode state.",
        epilog="example:\n  hyjax plan --config=configs/quickstart.py --config.model.layout='(GGGA)*12' --context=8192",
    )
    parser.add_argument("--config", required=True, metavar="FILE[:arg]", help=CONFIG_HELP)
    parser.add_argument("--context", type=positive, metavar="N", help="tokens a row (the config's training length)")
    parser.add_argument("--batch", type=positive, default=1, metavar="N", help="rows that decode at once (1)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    rest, overrides = split_overrides(argv)
    args = parser.read(rest)
    import jax

    jax.config.update("jax_platforms", "cpu")  # shapes need no accelerator, and must not take one from a running job
    config = load_config(args.config, overrides)
    from hyjax.cost import plan as plans

    with user_facing():
        result = plans.plan(config.model, args.context or config.data.seq_len, args.batch)
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        plans.show(result, args.batch)
    return 0
