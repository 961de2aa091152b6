"""Compares methods with the exact policy gradient: bias, variance and progress on small policies.

The first command prints weights by response length (`frontier`). The second prints methods that use a
group (`group_bias`), the third weights and objectives of one response (`sequence_bias`). The fourth
prints token weights with centred scores (`frontier`). From Python, `exact.Problem` accepts any loss.

Examples:

    python -m experiments.oracle --drift=0.1 --reward=last --png=oracle.png
    python -m experiments.oracle --groups --drift=0.5
    python -m experiments.oracle --sequences 5 5 --drift=0.5
    python -m experiments.oracle --centred
"""

import argparse
from collections.abc import Sequence

from experiments import frontier, group_bias, sequence_bias
from jaxrl_tis.runtime import cli


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"{count} is not at least 1")
    return count


def main(argv: Sequence[str] | None = None) -> None:
    """Command line: see the top of the file."""
    parser = cli.parser(
        "experiments.oracle",
        "Bias, variance and progress of off-policy policy gradients.", __doc__,
    )
    parser.add_argument("--drift", type=float, default=0.1, help="standard deviation of the logits' noise")
    parser.add_argument("--reward", default="last", choices=list(frontier.REWARDS))
    parser.add_argument("--horizons", type=_count, nargs="+", default=list(frontier.HORIZONS))
    parser.add_argument("--batch", type=_count, default=1, help="responses averaged per step")
    parser.add_argument("--samples", type=int, default=5000, help="sequences for the sampled methods")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--png", help="write a plot of bias against variance to this file")
    parser.add_argument("--groups", action="store_true", help="advantages and methods of a group instead")
    parser.add_argument(
        "--sequences",
        type=_count,
        nargs=2,
        metavar=("VOCAB", "HORIZON"),
        help="every weight and objective on one response instead",
    )
    parser.add_argument("--centred", action="store_true", help="centred scores of single tokens instead")
    args = parser.parse_args(argv)
    if args.centred:
        print(frontier.centred_table((256, 1024), (0, 1, 2), (0.03, 0.1, 0.3)))
        return
    if args.groups:
        steps, sizes = group_bias.STEPS, group_bias.GROUP_SIZES
        print(group_bias.table(group_bias.rows(steps, sizes, args.drift, args.seed)))
        return
    if args.sequences:
        steps = sequence_bias.STEPS
        vocab, horizon = args.sequences
        print(group_bias.table(sequence_bias.rows(steps, vocab, horizon, args.drift, args.seed)))
        return
    rows = frontier.sweep(
        args.drift, args.reward, args.horizons, args.batch, args.samples, args.seed
    )
    print(frontier.table(rows))
    if args.png:
        print(frontier.draw(rows, args.png))


if __name__ == "__main__":
    cli.run(main)
