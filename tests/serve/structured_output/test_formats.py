# SPDX-License-Identifier: Apache-2.0
"""Each format has only texts that Python's and pydantic's parsers load."""

from __future__ import annotations

import datetime
import ipaddress
import json
import re
import uuid

import pytest
from pydantic import AnyUrl, TypeAdapter

from phalanx.serve.structured_output.formats import FORMATS
from tests.support.grammars import accepts, opened, write


def loads(kind):
    return TypeAdapter(kind).validate_python


LOADED = {
    "date": (datetime.date.fromisoformat, ["2024-02-29", "0001-01-01"], ["2991-04-31", "2021-02-29", "2100-02-29", "0000-01-01"]),
    "time": (datetime.time.fromisoformat, ["23:59:59Z", "00:00:00.123456+05:30"], ["23:59:60Z", "24:00:00Z", "12:00:00"]),
    "date-time": (
        datetime.datetime.fromisoformat,
        ["2024-02-29T12:30:00Z"],
        ["2023-02-29T12:30:00Z", "2024-02-29T12:30:60Z", "2024-02-29"],
    ),
    "duration": (loads(datetime.timedelta), ["P3W", "P1Y2M3DT4H5M6S", "PT5S"], ["P", "PT", "P1W2D", "5S"]),
    "ipv4": (ipaddress.IPv4Address, ["0.0.0.0", "255.10.1.99"], ["000.116.150.000", "256.1.1.1", "1.2.3"]),
    "ipv6": (
        ipaddress.IPv6Address,
        ["::", "::1", "1::", "fe80::1:2", "1:2:3:4:5:6:7:8", "1:2:3:4:5:6:7::"],
        ["1:2:3", "1::2::3", ":::", "12345::"],
    ),
    "uuid": (
        uuid.UUID,
        ["123e4567-e89b-12d3-a456-426614174000"],
        ["123e4567e89b12d3a456426614174000", "123e4567-e89b-02d3-a456-426614174000"],
    ),
    "email": (None, ["a.b+c@x-y.example.org"], ["a@b", "a..b@c.de", "@c.de", "a@-c.de", "a b@c.de"]),
    "hostname": (None, ["a", "a-b.example"], ["-a", "a_b", "a..b", "xn--x"]),
    "uri": (loads(AnyUrl), ["https://a.b/c?d=e#f", "mailto:a@b.de"], ["a b", "//a", "http://"]),
}


def test_each_format_is_tested():
    assert set(LOADED) == set(FORMATS)


@pytest.mark.parametrize("format_", FORMATS)
def test_texts_of_a_format_are_loaded(format_):
    load, allowed, refused = LOADED[format_]
    matcher = opened("json_schema", json.dumps({"type": "string", "format": format_}))
    for seed in range(30):
        text = write(matcher, seed, after=12)
        if load is not None and text is not None:
            load(json.loads(text))
    assert [text for text in allowed if not accepts(matcher, json.dumps(text))] == []
    assert [text for text in refused if accepts(matcher, json.dumps(text))] == []


def test_all_dates():
    matches = re.compile(FORMATS["date"]).fullmatch
    for year in (0, 1, 4, 100, 400, 1900, 2000, 2023, 2024, 9999):
        for month in range(14):
            for day in range(33):
                text = f"{year:04}-{month:02}-{day:02}"
                try:
                    datetime.date.fromisoformat(text)
                    valid = True
                except ValueError:
                    valid = False
                assert bool(matches(text)) == valid, text
