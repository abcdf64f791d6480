"""Batches, names of methods and log lines are read in time in proportion to their size."""

import json

import pytest

from eyas.config.drafting import split_method
from eyas.config.router import RouterConfig, ServedModel
from eyas.services.local.batch import read_requests
from eyas.services.local.cluster import message_of
from tests.growth.growth import Reader, check_growth, label, pairs

LINE = {"method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


def ids(names: list[str]) -> list[str]:
    return [json.dumps({"custom_id": name, **LINE}) for name in names]


READERS = (
    Reader(
        "eyas.services.local.batch.read_requests",
        lambda lines: list(read_requests(lines)),
        {
            "ids of their own": lambda n: ids([f"r{number}" for number in range(n)]),
            "one id": lambda n: ids(["r"] * n),
            "no JSON": lambda n: ["{" * 20] * n,
            "one long line": lambda n: ids(["r" * n]),
            "deep": lambda n: ["[" * n],
        },
        limit=2**15,
    ),
    Reader(
        "eyas.config.drafting.split_method",
        split_method,
        {"one name": lambda n: "+suffix" * n, "pluses": lambda n: "+" * n, "long": lambda n: "a" * n},
        limit=2**17,
    ),
    Reader(
        "eyas.services.local.cluster._message",
        message_of,
        {"colons": lambda n: ": " * n, "braces": lambda n: "{" * n, "text": lambda n: "{" + '"a":1,' * n},
        limit=2**17,
    ),
    Reader(
        "eyas.config.router.RouterConfig",
        lambda names: RouterConfig((ServedModel("m", "t", aliases=tuple(names)),)),
        {"aliases": lambda n: [f"a{number}" for number in range(n)]},
        limit=2**12,
    ),
)


@pytest.mark.parametrize(("reader", "shape"), pairs(READERS), ids=label)
def test_commands_grow_no_faster_than_n_log_n(reader: Reader, shape: str) -> None:
    check_growth(reader, shape)
