"""Parameters of the rows: where they are read, what the columns mean, how they are split and become tokens."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag

from lm_tuning.parameters.base import (
    Count,
    CountOrZero,
    Fraction,
    FractionOrAll,
    ParameterGroup,
    PathText,
    PositiveNumber,
    Text,
)


class ColumnParameters(ParameterGroup):
    """Which column plays which role; null goes by the usual names, such as the role's own."""

    text: Text | None = None
    """Column with running text."""

    prompt: Text | None = None
    """Column with what the model is asked."""

    response: Text | None = None
    """Column with what the model should answer."""

    system: Text | None = None
    """Column with the system message of a row."""

    messages: Text | None = None
    """Column with a list of turns, each with role and content."""

    tools: Text | None = None
    """Column with the list of tools that a conversation may call, handed to the chat template."""

    label: Text | None = None
    """Column with the class name."""


class SourceParameters(ParameterGroup):
    """One source of rows among several, or one that needs more than a path."""

    path: PathText
    """File, folder, glob pattern, address such as s3://bucket/rows.jsonl, or name of a data set on the hub."""

    weight: PositiveNumber = 1.0
    """Times that each training row comes up per epoch: 2 repeats all rows, 0.5 draws another half every epoch."""

    config: Text | None = None
    """Configuration of a hub data set, where it has several; null for its only one."""

    split: Text | None = None
    """Split of a hub data set; null takes the one that the rows are read for."""

    revision: Text | None = None
    """Commit, tag or branch of a hub data set; null takes the newest."""

    field: Text | None = None
    """Path of the list of rows in a .json file that holds an object, such as train; null goes by data.field."""


def _kind_of_rows(value: object) -> str:
    """Tell pydantic which alternative a value means, so that messages speak of that one alone."""
    # An instance comes from code that builds the classes itself.
    if isinstance(value, list):
        return "#several"
    return "#source" if isinstance(value, dict | SourceParameters) else "#path"


# Without tags pydantic would try each alternative, and report a mistake in one mapping once for all of them. A tag with
# a # is nobody's key, so that messages can leave it out.
_OnePath = Annotated[PathText, Tag("#path")]
_OneSource = Annotated[SourceParameters, Tag("#source")]
Source = Annotated[_OnePath | _OneSource, Discriminator(_kind_of_rows)]
Rows = Annotated[_OnePath | _OneSource | Annotated[list[Source], Tag("#several")], Discriminator(_kind_of_rows)]


def _check_delimiter(value: str) -> str:
    # A quote or a backslash already means something in a CSV file, and a letter would cut words.
    is_mark = len(value) == 1 and not value.isalnum() and not value.isspace() and value not in "\"'\\"
    if value in ("auto", "tab", "\t") or is_mark:
        return value
    raise ValueError(
        'it takes auto, tab, or one character such as ";" or "|", which is no letter, digit, space or quote'
    )


Delimiter = Annotated[str, AfterValidator(_check_delimiter)]


class DataParameters(ParameterGroup):
    """Which rows are read, and what becomes of rows that do not fit."""

    path: Rows = "data/01_raw/example/functions.jsonl"
    """Where the rows are: file, folder, glob pattern, address or hub name, or a list of them; the example is made on
    first use."""

    validation_path: Rows | None = None
    """Where the validation rows are; null takes them from path, as many as split.validation says."""

    test_path: Rows | None = None
    """Where the test rows are; null takes them from path, as many as split.test says."""

    max_rows: Count | None = None
    """Rows read of each file, from its beginning, for a quick look; null reads all."""

    max_row_bytes: Count = 64 * 1024 * 1024
    """Largest size of a row in bytes, unpacked; a longer one is a bad row and is never held in memory."""

    field: Text | None = None
    """Path of the list of rows in .json files that hold an object, such as train or data.train; null for files that
    are a list, or have an object per line."""

    explode: Text | list[Text] | None = None
    """Path of a list of which every element makes a row of its own, the rest of the row repeated; several paths for
    lists in lists, the outermost first; null makes none."""

    delimiter: Delimiter = "auto"
    """Character that separates the fields of .csv and .tsv files, or tab; auto finds it out where the header leaves no
    doubt."""

    format: Literal["auto", "text", "prompt_response", "messages", "text_label"] = "auto"
    """What one row is; auto reads it off the columns."""

    columns: ColumnParameters = ColumnParameters()
    """Which column plays which role."""

    template: Text | None = None
    """Prompt or text made of columns named in braces, such as "Summarize:\\n{dialogue}"; null for a column as it is."""

    on_bad_row: Literal["error", "skip"] = "error"
    """What a bad row does: error names the rows and stops, skip leaves them out and counts them."""

    max_bad_fraction: Fraction = 0.05
    """Largest share of bad rows that on_bad_row: skip lets pass; up to three always pass, unless it is 0."""

    normalize: Literal["nfc", "none"] = "nfc"
    """Unicode form of all text: nfc makes composed and decomposed letters equal, none keeps the bytes of the file."""


# Every field decides who goes where, so all of them count for the key of the splits.
class SplitParameters(ParameterGroup):
    """How rows are divided into train, validation and test."""

    validation: CountOrZero | Fraction = 0.05
    """Validation rows: a fraction of all rows, or a number of rows; 0 for none. Without effect with num_folds."""

    test: CountOrZero | Fraction = 0.05
    """Test rows: a fraction of all rows, or a number of rows; 0 for none."""

    group: Text | None = None
    """Column whose equal values stay in one split, such as an author or a document; null lets rows move freely."""

    stratify: Text | None = None
    """Column whose values keep their shares in every split; null draws without regard to any."""

    key: Text | None = None
    """Column that permanently identifies a training row, such as an id: the division follows it, not the row order."""

    num_folds: Annotated[int, Field(ge=2)] | None = None
    """Folds that the rows outside test are cut into; one of them is validation. Null for split.validation."""

    fold: CountOrZero = 0
    """Which fold is validation, counted from 0."""

    duplicates: Literal["keep_together", "drop", "ignore"] = "keep_together"
    """Rows with the same text: keep_together puts all copies in one split, drop keeps the first, ignore looks away."""

    duplicates_by: Literal["row", "text"] = "row"
    """What makes a row a copy that drop leaves out, where rows have a label: row wants text and label to be the same,
    text the text alone, so that no text stays under two labels."""

    near_duplicates: Literal["keep_together", "drop", "report", "ignore"] = "ignore"
    """Rows that are almost the same: as for duplicates; report counts those that two splits share and moves none."""

    near_duplicate_similarity: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Share of six-byte sequences (six Latin letters, two Korean or Chinese ones) that two rows have in common
    (Jaccard) from which they count as near duplicates."""


#: What every chat template is given for each row, so that no argument may bear these names.
GIVEN_TO_TEMPLATES = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")


def _refuse_taken_names(arguments: dict[str, Any]) -> dict[str, Any]:
    """Refuse arguments that would take the place of what a row is rendered from."""
    # apply_chat_template() would take the argument in place of the row, and render every row the same.
    taken = [name for name in arguments if name in GIVEN_TO_TEMPLATES]
    if taken:
        raise ValueError(
            f"{' and '.join(taken)} {'is' if len(taken) == 1 else 'are'} given to the template for each row, so no "
            "argument can have that name"
        )
    return arguments


# Any value, since a template may want a list or a mapping. What it makes of the value is seen
# when it is called.
TemplateArguments = Annotated[dict[str, Any], AfterValidator(_refuse_taken_names)]


class TokenizeParameters(ParameterGroup):
    """How long a row may be and which of its tokens are supervised."""

    max_length_tokens: Count = 512
    """Longest row, in tokens; memory grows with it, and attention's share of the time with its square. For seq2seq_lm
    the longest source."""

    max_target_tokens: Count = 128
    """Longest target, in tokens, for seq2seq_lm; without effect for other tasks."""

    truncation: Literal["truncate_prompt", "truncate_end", "drop", "error"] = "truncate_prompt"
    """What a longer row does: lose a part of its prompt, lose its end, be dropped, or stop the run. The text of a class
    and the source of seq2seq_lm give way as a prompt does; running text and targets always lose their end."""

    cut_prompt_at: Literal["middle", "end", "start"] = "middle"
    """Where truncate_prompt takes tokens out of a prompt. The fixed text of data.template and of the chat template
    stays, and the longest column or turn gives way first."""

    max_lost_fraction: FractionOrAll = 0.5
    """Largest share of the training rows' tokens, from 0 to 1, that the limits may cut or drop; more stops the run. 1
    lets everything pass."""

    loss_on: Literal["assistant", "completion", "all"] = "assistant"
    """Tokens that are learned by causal_lm: every assistant turn, only the last one, or everything."""

    on_altered_content: Literal["warn", "error"] = "warn"
    """What happens when the chat template changes or leaves out what a row says, such as its reasoning: warn counts the
    rows, error stops the run and names the first."""

    system_turn: Literal["keep", "merge_into_user"] = "keep"
    """What the chat template gets of a system turn: the turn itself, or its text before that of the next user turn, for
    templates that refuse or leave out system turns."""

    template_arguments: TemplateArguments = Field(default={})
    """Further arguments of the chat template, name to value, such as enable_thinking: false. A tuned model is evaluated
    with the same."""

    control_tokens: Literal["auto", "as_text", "keep", "drop", "error"] = "auto"
    """What happens to a control token, such as <|im_end|>, that is typed inside a row: as_text learns its letters, keep
    the token, drop leaves the row out, error stops the run; auto is as_text in turns and keep in running text."""
