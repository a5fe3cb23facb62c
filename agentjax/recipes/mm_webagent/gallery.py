"""One page that shows all pages of a folder: pictures before and after, scores, rounds."""

from __future__ import annotations

import html
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentjax.files import write_atomically
from agentjax.recipes.mm_webagent.score import ASPECTS

GALLERY = "gallery.html"
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:0;background:#f4f4f5;color:#18181b}
main{max-width:1320px;margin:0 auto;padding:24px}table{border-collapse:collapse;background:#fff}
td,th{padding:4px 12px;border:1px solid #d4d4d8;text-align:right}th:first-child{text-align:left}
article{background:#fff;border-radius:12px;padding:18px 22px;margin:22px 0}
.two{display:grid;grid-template-columns:1fr 1fr;gap:18px}figure{margin:0}
.two img{width:100%;height:520px;object-fit:cover;object-position:top;border:1px solid #d4d4d8}
details{margin-top:10px}pre{white-space:pre-wrap;font-size:13px}
"""


def write_gallery(folder: pathlib.Path, results: Sequence[Mapping[str, Any]]) -> pathlib.Path:
  """``gallery.html`` of the pages in a folder.

  Args:
    folder: holds a folder for each page, by its id.
    results: as in their ``result.json``.
  """
  path = folder / GALLERY
  body = "".join([_means(results), *(_article(result) for result in results)])
  page = (
    f"<!doctype html><html lang='en'><meta charset='utf-8'><title>Pages</title>"
    f"<style>{_STYLE}</style><main><h1>{len(results)} pages</h1>{body}</main></html>\n"
  )
  write_atomically(path, page.encode("utf-8", "replace"))
  return path


def means(results: Sequence[Mapping[str, Any]], which: str) -> dict[str, float]:
  """Mean of the overall score and of each aspect, over the pages that have it.

  Args:
    results: of pages.
    which: "first" or "best".
  """
  found = {"overall": [r[which]["overall"] for r in results]}
  for name in ASPECTS:
    found[name] = [v for r in results if (v := r[which]["aspects"].get(name)) is not None]
  return {name: sum(values) / len(values) for name, values in found.items() if values}


def _means(results: Sequence[Mapping[str, Any]]) -> str:
  return _table({"first": means(results, "first"), "best": means(results, "best")})


def _table(rows: Mapping[str, Mapping[str, float]]) -> str:
  names = ["overall", *ASPECTS]
  head = "".join(f"<th>{name}</th>" for name in names)
  lines = (
    "".join(f"<td>{row[n]:.2f}</td>" if n in row else "<td>-</td>" for n in names)
    for row in rows.values()
  )
  body = "".join(f"<tr><th>{name}</th>{line}</tr>" for name, line in zip(rows, lines, strict=True))
  return f"<table><tr><th></th>{head}</tr>{body}</table>"


def _article(result: Mapping[str, Any]) -> str:
  name = html.escape(str(result["id"]))
  rows = {w: {"overall": result[w]["overall"], **result[w]["aspects"]} for w in ("first", "best")}
  figures = "".join(
    f"<figure><a href='{name}/{which}.png'><img src='{name}/{which}_small.png' alt='{which}'></a>"
    f"<figcaption>{which}</figcaption></figure>"
    for which in ("first", "best")
  )
  request = html.escape(result["request"])
  return (
    f"<article><h2><a href='{name}/index.html'>{name}</a></h2><p>{request[:260]}...</p>"
    f"<div class='two'>{figures}</div>{_table(rows)}"
    f"<details><summary>{len(result['rounds'])} rounds, {len(result['best']['issues'])} issues "
    f"left</summary><pre>{html.escape(chr(10).join(_lines(result)))}</pre></details></article>"
  )


def _lines(result: Mapping[str, Any]) -> Iterator[str]:
  for one in result["rounds"]:
    kept = "kept" if one["kept"] else "left out"
    yield (
      f"{one['item']}, round {one['number']}: {one['before']:.2f} -> {one['after']:.2f} "
      f"(page {one['overall']:.2f}), {kept}"
    )
  for issue in result["best"]["issues"]:
    yield f"{issue['aspect']}, {issue['code']}: {issue['detail']}"
