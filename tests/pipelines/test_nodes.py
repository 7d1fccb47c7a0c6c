"""Nodes are short, and run by name or tag, so the page that lists both is true."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from lm_tuning.pipeline_registry import register_pipelines

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "view_graph.md"


def test_a_node_reads_like_a_table_of_contents() -> None:
    command = [sys.executable, "benchmarks/code_size.py", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["."]["nodes_over_20_lines"] == []


def test_the_page_lists_every_node_with_its_tags() -> None:
    (block,) = re.findall(r"```text\nnode .*\n((?:.+\n)+)```", PAGE.read_text(encoding="utf-8"))
    columns = [re.split(r"\s{2,}", line) for line in block.splitlines()]
    listed = {name: set(tags.split(", ") if what else ()) for name, tags, *what in columns}
    assert listed == {node.name: node.tags for pipeline in register_pipelines().values() for node in pipeline.nodes}


def test_what_a_report_makes_is_read_by_no_other_node() -> None:
    for pipeline in register_pipelines().values():
        reports = pipeline.only_nodes_with_tags("reports").all_outputs()
        assert not reports & pipeline.all_inputs()
