# SPDX-License-Identifier: Apache-2.0
"""The formats of JSON Schema that are enforced, as regular expressions (in Rust's syntax) of texts that Python's parsers load.

llguidance's own are outlines: they have 2021-02-29, second 60 and the year 0000. Each text here is also valid by its RFC. Rare
texts are left out: IPv4 within IPv6, quoted local parts of addresses, leap seconds.
"""

from __future__ import annotations

_YEAR = r"(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP = (
    r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"  # every 4th year, of centuries every 4th
)
_DATE = (
    rf"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    rf"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_HOST_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9]|-[a-zA-Z0-9]){0,30}"  # no two hyphens: "xn--" is punycode
_H = "[0-9a-fA-F]{1,4}"
_DURATION_TIME = r"T(?:[0-9]{1,4}H(?:[0-9]{1,4}M(?:[0-9]{1,4}S)?)?|[0-9]{1,4}M(?:[0-9]{1,4}S)?|[0-9]{1,4}S)"
_URI_CHARACTER = r"(?:[a-zA-Z0-9\-._~!$&'()*+,;=:@]|%[0-9a-fA-F]{2})"

FORMATS: dict[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    # Python's timedelta ends after 2.7 million years.
    "duration": rf"P(?:[0-9]{{1,4}}W|(?:[0-9]{{1,4}}Y(?:[0-9]{{1,4}}M(?:[0-9]{{1,4}}D)?)?|[0-9]{{1,4}}M(?:[0-9]{{1,4}}D)?"
    rf"|[0-9]{{1,4}}D)(?:{_DURATION_TIME})?|{_DURATION_TIME})",
    "ipv4": rf"(?:{_OCTET}\.){{3}}{_OCTET}",
    "ipv6": "(?:"
    + "|".join(
        [
            f"(?:{_H}:){{7}}{_H}",
            f"{_H}(?::{_H}){{6}}::",
            f"::(?:{_H}(?::{_H}){{0,6}})?",
            *(f"{_H}(?::{_H}){{{before - 1}}}::(?:{_H}(?::{_H}){{0,{6 - before}}})?" for before in range(1, 7)),
        ]
    )
    + ")",
    "uuid": r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[1-8][0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}",
    "email": rf"[a-zA-Z0-9_+](?:[a-zA-Z0-9_+-]|\.[a-zA-Z0-9_+]){{0,30}}@(?:{_HOST_LABEL}\.){{1,4}}[a-zA-Z]{{2,24}}",
    "hostname": rf"{_HOST_LABEL}(?:\.{_HOST_LABEL}){{0,3}}",
    "uri": r"[a-zA-Z][a-zA-Z0-9+.-]*:(?://(?:" + _LABEL + r"(?:\." + _LABEL + r")*)(?::[1-9][0-9]{0,3})?(?:/" + _URI_CHARACTER
    + r"*)*|/?" + _URI_CHARACTER + r"+(?:/" + _URI_CHARACTER + r"*)*)(?:\?(?:" + _URI_CHARACTER + r"|[/?])*)?(?:#(?:"
    + _URI_CHARACTER + r"|[/?])*)?",
}  # fmt: skip
"""Any other format is an annotation, as the specification says; so is a format beside a `pattern`, which says more."""

EQUAL_PATTERNS: dict[str, str] = {
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": (
        r"(?:[A-Za-z0-9_'+-]+(?:\.[A-Za-z0-9_'+-]+)*\.)?[A-Za-z0-9_'+-]*[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}"
    ),
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": FORMATS["duration"],
}
"""Patterns that Zod writes beside `format`, whose lookarounds no grammar can enforce, and patterns of which each text matches
them."""
