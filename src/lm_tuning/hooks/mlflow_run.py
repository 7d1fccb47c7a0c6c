"""One MLflow run that is written to by its id, whichever run MLflow takes for the active one."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lm_tuning.datasets.metric_names import has_earlier_names, name_figures
from lm_tuning.hooks.run_description import NOT_SET, PARAMETERS_ARTIFACT, clean_name, find_changes, flatten_settings
from lm_tuning.secrets import mask, mask_values

logger = logging.getLogger(__name__)

#: How many parameters or tags MLflow takes at once.
BATCH_SIZE = 100
MAX_TAG_CHARACTERS = 5000
RESUME_COUNT_TAG = "resume.count"


class MlflowRun:
    """Write settings, tags, figures and files of a run, new or resumed.

    MLflow never changes a parameter, and a resumed run should still tell how it began. So what differs from the
    beginning goes to tags ``resume.<n>.<name>``, with n counting the resumes.

    Attributes:
        run_id: id of the run.
        num_resumes: how often the run was resumed, this time included; 0 in a new run.
        earlier_names: whether its metrics have the names of earlier versions, and so keep them.
    """

    def __init__(self, run_id: str) -> None:
        """Look up whether the run was written to before, and count that as a resume.

        Args:
            run_id: id of an existing run.
        """
        from mlflow import MlflowClient

        self.run_id = run_id
        self._client = MlflowClient()
        self.num_resumes = 0
        stored = self._client.get_run(run_id).data
        self.earlier_names = has_earlier_names(stored.metrics)
        if stored.params:
            self.num_resumes = int(stored.tags.get(RESUME_COUNT_TAG, 0)) + 1
            self._set_tags({RESUME_COUNT_TAG: str(self.num_resumes)})

    def log_settings(self, parameters: Mapping[str, Any]) -> None:
        """Log each setting as a parameter and all of them as a file.

        Args:
            parameters: groups of settings, JSON values.
        """
        import yaml
        from mlflow.entities import Param

        parameters = mask_values(parameters)
        settings = flatten_settings(parameters)
        folder = ""
        if self.num_resumes:
            folder = f"resume/{self.num_resumes}/"
            stored = self._client.get_run(self.run_id).data.params
            changes = find_changes(stored, settings)
            self._set_tags({f"resume.{self.num_resumes}.{name}": value for name, value in changes.items()})
            if changes:
                logger.warning(
                    "Resumed with other settings: %s. MLflow keeps the first values as parameters; the new ones are "
                    "the tags resume.%d.*.",
                    ", ".join(f"{name} ({stored.get(name, NOT_SET)} -> {value})" for name, value in changes.items()),
                    self.num_resumes,
                )
            settings = {name: value for name, value in settings.items() if name not in stored and name not in changes}
        entries = [Param(name, value) for name, value in settings.items()]
        for start in range(0, len(entries), BATCH_SIZE):
            self._client.log_batch(self.run_id, params=entries[start : start + BATCH_SIZE])
        text = yaml.safe_dump(dict(parameters), sort_keys=False, allow_unicode=True)
        self._client.log_text(self.run_id, text, f"{folder}{PARAMETERS_ARTIFACT}")

    def log_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags; in a resumed run, those that differ stand beside the first ones."""
        if self.num_resumes:
            stored = self._client.get_run(self.run_id).data.tags
            tags = {
                f"resume.{self.num_resumes}.{name}" if name in stored else name: value
                for name, value in tags.items()
                if stored.get(name) != value
            }
        self._set_tags(tags)

    def take_resume_back(self, reason: str) -> None:
        """Leave a resumed run as it was before, but for the reason why this resume was refused.

        Args:
            reason: kept as the tag ``refused`` until the next refusal.
        """
        prefix = f"resume.{self.num_resumes}."
        for name in self._client.get_run(self.run_id).data.tags:
            if name.startswith(prefix):
                self._client.delete_tag(self.run_id, name)
        self.num_resumes -= 1
        self._set_tags({"refused": reason, RESUME_COUNT_TAG: str(self.num_resumes)})

    def log_figures(self, entry: str, figures: Mapping[str, float], *, split: str | None = None) -> None:
        """Log numbers that belong to the run as a whole, at step 0.

        Args:
            entry: key in the catalog of the report that they are from.
            figures: by their names in that report.
            split: the split that they were measured on; ``None`` for none.
        """
        from mlflow.entities import Metric

        if not self.earlier_names:
            figures = name_figures(entry, figures, split=split)
        now = time.time_ns() // 1_000_000
        self._client.log_batch(self.run_id, metrics=[Metric(name, value, now, 0) for name, value in figures.items()])

    def log_artifact(self, path: Path, folder: str) -> None:
        """Copy a file, or what lies in a folder, into a folder of the run."""
        log = self._client.log_artifacts if path.is_dir() else self._client.log_artifact
        log(self.run_id, str(path), folder)

    def close(self, status: str) -> None:
        """Set the status and leave the run active nowhere in this thread.

        Args:
            status: ``FINISHED``, ``FAILED`` or ``KILLED``.
        """
        import mlflow

        while (active := mlflow.active_run()) and active.info.run_id == self.run_id:
            mlflow.end_run(status)
        self._client.set_terminated(self.run_id, status)  # also when another thread has it open

    def _set_tags(self, tags: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        entries = [RunTag(clean_name(name), mask(str(value))[:MAX_TAG_CHARACTERS]) for name, value in tags.items()]
        for start in range(0, len(entries), BATCH_SIZE):
            self._client.log_batch(self.run_id, tags=entries[start : start + BATCH_SIZE])
