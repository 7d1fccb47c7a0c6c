"""The look of the page: legible on a phone, in light and in dark, and on paper."""

STYLE = """
:root {
  --back: #ffffff; --raised: #f4f6f8; --text: #1c2024; --quiet: #565e66; --line: #d4d9de; --link: #0b57b0;
  --bar: #3572b0; --learned: #cdeccf; --learned-text: #0c3614; --learned-line: #2e7d3b; --control: #5b3ea6;
  --stop: #a3161c; --warning: #8a4b00; --note: #2f5f8f;
}
@media (prefers-color-scheme: dark) {
  :root {
    --back: #14171a; --raised: #1e2327; --text: #e4e7ea; --quiet: #a4adb5; --line: #39414a; --link: #8ab8f0;
    --bar: #6fa8e0; --learned: #1d4a28; --learned-text: #dcf5e0; --learned-line: #6cc47e; --control: #c6b4ff;
    --stop: #ff9b96; --warning: #f0b866; --note: #9cc3ea;
  }
}
* { box-sizing: border-box; }
html { scroll-padding-top: 1rem; }
body {
  margin: 0 auto; max-width: 64rem; padding: 1rem clamp(0.75rem, 3vw, 2rem) 4rem; background: var(--back);
  color: var(--text); font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere;
}
h1 { margin: 0; font-size: 1.7rem; }
h2 { margin: 2.5rem 0 0.75rem; padding-top: 0.5rem; border-top: 1px solid var(--line); font-size: 1.3rem; }
h3 { margin: 1.5rem 0 0.25rem; font-size: 1.05rem; }
p { margin: 0.5rem 0; max-width: 46rem; }
a { color: var(--link); }
code { font: 0.92em ui-monospace, monospace; background: var(--raised); padding: 0.05em 0.25em; border-radius: 3px; }
.subtitle, .axis, .legend, .panel-name span { color: var(--quiet); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); gap: 0.5rem; margin: 1rem 0; }
.tiles div { display: flex; flex-direction: column-reverse; padding: 0.5rem 0.75rem; background: var(--raised);
  border-radius: 6px; }
.tiles dt { color: var(--quiet); font-size: 0.85rem; }
.tiles dd { margin: 0; font-size: 1.35rem; font-weight: 600; font-variant-numeric: tabular-nums; }
nav ul { display: flex; flex-wrap: wrap; gap: 0.25rem 1.1rem; margin: 0; padding: 0; list-style: none; }
nav a { display: inline-block; padding: 0.3rem 0; }
.concerns { margin: 0; padding: 0; list-style: none; }
.concerns li { display: flex; gap: 0.75rem; padding: 0.6rem 0.75rem; margin-bottom: 0.5rem; background: var(--raised);
  border-left: 4px solid; border-radius: 0 6px 6px 0; }
.concerns strong { flex: 0 0 5rem; overflow-wrap: normal; }
.concerns li > span { color: var(--text); min-width: 0; }
.concerns .stop { color: var(--stop); }
.concerns .warning { color: var(--warning); }
.concerns .note { color: var(--note); }
.advice { color: var(--quiet); }
.scroll { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; min-width: min(100%, 28rem); font-size: 0.95rem; }
caption, figcaption { padding-bottom: 0.35rem; text-align: left; font-weight: 600; }
th, td { padding: 0.3rem 0.9rem 0.3rem 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top;
  overflow-wrap: normal; }
thead th { color: var(--quiet); font-weight: 500; }
tbody th { font-weight: 400; }
tbody th:not(.number) { min-width: 8rem; }
tfoot th, tfoot td { border-bottom: 0; font-weight: 600; }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.bars { width: 100%; }
.bars tbody th { width: 1%; min-width: min(14rem, 36vw); overflow-wrap: anywhere; }
.bars td.number { width: 1%; padding-right: 0; }
.bar { min-width: 6rem; vertical-align: middle; }
.bar div { height: 0.9rem; min-width: 1px; background: var(--bar); border-radius: 0 2px 2px 0; }
figure { margin: 1rem 0; max-width: 46rem; }
svg { display: block; width: 100%; height: 6.5rem; border-bottom: 1px solid var(--quiet); }
svg rect { fill: var(--bar); }
svg line { stroke: var(--text); stroke-width: 1.5; stroke-dasharray: 5 4; vector-effect: non-scaling-stroke; }
.panel-name { margin-top: 0.6rem; font-size: 0.9rem; }
.axis { display: flex; justify-content: space-between; font-size: 0.85rem; font-variant-numeric: tabular-nums; }
.legend { margin: 0.25rem 0; font-size: 0.85rem; }
pre { margin: 0.5rem 0; padding: 0.75rem 1rem; max-height: 32rem; overflow: auto; background: var(--raised);
  border-radius: 6px; font: 0.9rem/1.6 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
mark { background: var(--learned); color: var(--learned-text); border-bottom: 2px solid var(--learned-line); }
.control { color: var(--control); font-weight: 600; }
mark .control { color: inherit; outline: 1px solid var(--learned-line); }
.space { color: var(--quiet); }
mark .space { color: inherit; }
:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
@media (max-width: 34rem) {
  .concerns li { flex-direction: column; gap: 0.1rem; }
  .concerns strong { flex-basis: auto; }
}
@media print { nav { display: none; } pre { max-height: none; } }
"""
