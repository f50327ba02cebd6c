"""The report's style sheet: light and dark as the reader's system is, and fit for paper."""

from __future__ import annotations

__all__ = ["STYLE"]

STYLE = """
:root { color-scheme: light dark; --ink: #16181a; --muted: #5d646b; --paper: #ffffff; --line: #d9dde1; --soft: #f4f6f8;
  --warn: #8a4b00; --warn-paper: #fff4e0; --good: #00694d; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8eaec; --muted: #a3abb3; --paper: #15181b; --line: #363c42;
  --soft: #1e2226; --warn: #ffc66b; --warn-paper: #33270f; --good: #6fd6b4; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, "Segoe UI", Roboto,
  "DejaVu Sans", sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .25rem; }
h2 { font-size: 1.3rem; margin: 3rem 0 .5rem; padding-top: 1rem; border-top: 1px solid var(--line); }
h3 { font-size: 1.05rem; margin: 1.75rem 0 .25rem; }
p, li { max-width: 46rem; } p { margin: .5rem 0; }
.muted, figcaption, caption { color: var(--muted); font-size: .9rem; }
.lead { font-size: 1.1rem; }
aside { background: var(--warn-paper); border-left: 4px solid var(--warn); padding: .6rem 1rem; margin: 1rem 0; }
aside strong { color: var(--warn); } aside ul { margin: .25rem 0; padding-left: 1.2rem; }
nav ul { columns: 2; padding-left: 1.2rem; margin: .5rem 0; }
a { color: inherit; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; margin: .5rem 0 1rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; padding-bottom: .25rem; }
th, td { padding: .3rem .7rem .3rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
th { font-weight: 600; } thead th { color: var(--muted); font-weight: 500; vertical-align: bottom; }
td.n, th.n { text-align: right; white-space: nowrap; }
tr.own td, tr.own th { background: var(--soft); font-weight: 600; }
td small, th small { color: var(--muted); font-weight: 400; display: block; }
figure { margin: 1rem 0; } figure svg { width: 100%; height: auto; display: block; }
figure.small svg { max-width: 38rem; }
figure svg text { font-family: system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif !important; }
details { margin: .75rem 0; } summary { cursor: pointer; color: var(--muted); }
code { font-size: .85em; overflow-wrap: anywhere; }
@media print { main { max-width: none; padding: 0; } h2, h3 { break-after: avoid; }
  figure, tr, aside { break-inside: avoid; } h2 { break-before: page; } h2.first { break-before: auto; }
  body { font-size: 10.5pt; } nav { display: none; } }
"""
