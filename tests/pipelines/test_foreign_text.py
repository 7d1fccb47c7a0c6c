"""Rows, classes and names that look like markup, through whole runs: terminal, log file and reports show them."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from markdown_it import MarkdownIt

from lm_tuning.wording import on_one_line, visible
from tests.pipelines.test_whole_run import Project
from tests.support.hostile import HOSTILE, ON_ONE_LINE
from tests.support.shell import Shell

LOG_FILE = "logs/info.log"
NAMES = tuple(text for text in HOSTILE if text.strip() == text and "\n" not in text and "\r" not in text)
"""Names of classes; a title with a terminal's bell in it among them."""


class HostileProject(Project):
    """A project whose log goes to a file as well, and whose rows are strings that look like markup."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        logging = yaml.safe_load((folder / "conf/logging.yml").read_text())
        logging["root"]["handlers"] = ["rich", "info_file"]
        (folder / "conf/logging.yml").write_text(yaml.safe_dump(logging))
        (folder / "logs").mkdir()

    def logged(self) -> str:
        """Return the log file, and begin a new one for the next command."""
        path = self.folder / LOG_FILE
        text = path.read_text(encoding="utf-8")
        with path.open("r+b") as file:
            file.truncate(0)
        return text

    def report(self, name: str) -> str:
        return (self.folder / "data/08_reporting/smoke" / name).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostileProject]:
    folder = tmp_path_factory.mktemp("hostile")
    project = HostileProject(folder / "project")
    with Shell(folder, {**project.environment, "COLUMNS": "1000"}) as project.shell:
        yield project


def shown_markdown(markdown: str) -> str:
    """Return all text that a renderer of GitHub's Markdown shows; nothing in it may have become HTML or a link."""
    shown = []
    for token in MarkdownIt("gfm-like", {"linkify": False}).parse(markdown):
        assert token.type != "html_block", token.content
        shown.append(token.content if token.type == "fence" else "")
        for child in token.children or ():
            # The report's own links lead to another part of it.
            is_own = child.type == "link_open" and re.fullmatch(r"#row-\d+", str(child.attrs["href"]))
            assert is_own or child.type not in ("html_inline", "link_open", "image"), child
            shown.append(child.content)
    return "\n".join(shown)


def shown_page(page: str) -> str:
    """Return the text of an HTML page, in which no tag comes from a row."""
    assert "<script" not in page
    body = re.sub(r'<span class="space" aria-hidden="true">(·+)</span>', lambda found: " " * len(found[1]), page)
    body = re.sub(r'<span class="space"[^>]*>.</span>', "", body.partition("</head>")[2])
    return html.unescape(re.sub(r"<[^>]*>", "", body))


@pytest.mark.parametrize("part", [ON_ONE_LINE[::2], ON_ONE_LINE[1::2]])
def test_prompts_reach_terminal_log_and_reports_as_they_are(project: HostileProject, part: tuple[str, ...]) -> None:
    # Each row has all of them, so that the one row that is shown as an example has them too. The tiny tokenizer knows
    # no control characters.
    texts = [text.translate({0x1B: None, 0x07: None, 0x0D: None}) for text in part]
    rows = [{"question": " ; ".join([str(number), *texts]), "answer": f"[/b] [red]{number}"} for number in range(80)]
    (project.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = {"tokenize__max_length_tokens": 500, "train__effective_batch_tokens": 1000, "split__validation": 4}
    sizes |= {"data__columns__prompt": "question", "data__columns__response": "answer", "split__test": 4}
    printed = project.run("--pipelines=preflight", **sizes)
    markdown, page = project.report("preflight.md"), project.report("preflight.html")
    for text in (*texts, "[/b] [red]"):
        assert text in printed, text
        assert text in shown_markdown(markdown), text
        assert text in shown_page(page), text
    project.logged()
    printed = project.run(**sizes)
    logged, evaluation = project.logged(), shown_markdown(project.report("evaluation.md"))
    for text in (*texts, "[/b] [red]"):
        assert text in printed, text
        assert text in logged, text
        assert text in evaluation, text


def test_classes_reach_terminal_log_and_reports_as_they_are(project: HostileProject) -> None:
    rows = [
        {"text": f"{number} of {name}", "label": name}
        for name in NAMES
        for number in range(1 if name == "[/rare]" else 6)
    ]
    (project.folder / "classes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {
        "data__path": "classes.jsonl",
        "task": "sequence_classification",
        "data__columns__text": "text",
        "data__columns__label": "label",
        "split__stratify": "label",
        "split__validation": 0.3,
        "split__test": 0.3,
        "evaluate__max_loss_rows": 1000,
    }
    printed = project.run("--pipelines=preflight", **given)
    printed += project.run(**given)
    logged = project.logged()
    assert "[/rare]" in logged
    reports = [shown_markdown(project.report(name)) for name in ("data_report.md", "evaluation.md", "preflight.md")]
    page = shown_page(project.report("preflight.html"))
    for name in NAMES:
        if name == "[/rare]":
            assert name in printed
            continue
        shown = on_one_line(visible(name))
        for report in reports:
            assert shown in report, name
        assert shown in page, name
    assert "\x1b" not in printed + logged + "".join(reports) + page
    for name in ("[red]x", "[b]bold 28[/b]", "[@click=app.quit]z[/]", "[link=http://x]y[/link]", ":warning: :smile:"):
        assert name in printed, name


@pytest.mark.parametrize("name", ["[bold]x.jsonl", "[/x].jsonl", "[@click=app.quit] :smile: `a`.jsonl"])
def test_a_path_that_looks_like_markup_is_named_as_it_is(project: HostileProject, name: str) -> None:
    (project.folder / name).parent.mkdir(exist_ok=True)
    (project.folder / name).write_text('{"question": "a"}\n')
    assert name in project.run("--pipelines=split", exit_code=2, data__path=f"'{name}'")
    project.write_rows(80)
    (project.folder / name).write_text((project.folder / "rows.jsonl").read_text())
    assert f"Rows of train: {name}" in project.run("--pipelines=split", data__path=f"'{name}'")
    assert name in shown_markdown(project.report("data_report.md"))


def test_codes_of_findings_are_printed(project: HostileProject) -> None:
    # Longer than rows may be, so that every answer loses its end.
    rows = [{"question": f"{number}?", "answer": f"{number} {'long ' * 60}"} for number in range(80)]
    (project.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    printed = project.run(evaluate__num_generate_rows=0, tokenize__max_lost_fraction=1)
    assert "Health [end-not-taught] none of" in printed
    assert "Health [end-not-taught] none of" in project.logged()


def test_from_another_logging_configuration(project: HostileProject, tmp_path: Path) -> None:
    """Kedro's own, which a run from a subfolder gets, takes brackets for styles."""
    project.write_rows(80)
    (tmp_path / "logging.yml").write_text(
        "version: 1\ndisable_existing_loggers: false\n"
        "handlers: {rich: {class: kedro.logging.RichHandler, rich_tracebacks: true, markup: true}}\n"
        "root: {handlers: [rich], level: INFO}\n"
    )
    environment = {**project.environment, "KEDRO_LOGGING_CONFIG": str(tmp_path / "logging.yml"), "COLUMNS": "1000"}
    kept = project.shell
    (project.folder / "[").mkdir(exist_ok=True)
    (project.folder / "[/b] rows.jsonl").write_text((project.folder / "rows.jsonl").read_text())
    with Shell(tmp_path, environment) as project.shell:
        printed = project.run("--pipelines=split", data__path="'[/b] rows.jsonl'")
    project.shell = kept
    assert "Rows of train: [/b] rows.jsonl" in printed
