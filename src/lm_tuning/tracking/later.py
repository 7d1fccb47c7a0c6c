"""Send what runs could not tell MLflow while it was away."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lm_tuning.tracking.address import bounded_requests, choose_address
from lm_tuning.tracking.delivery import Delivery
from lm_tuning.tracking.journal import Journal, describe_count, list_journals
from lm_tuning.tracking.sender import Sender

#: How long the store may show no sign of life, seconds. Someone is waiting for this, so it is more patient than a run.
PATIENCE_SECONDS = 30.0


def send_journals(root: Path, uri: str, *, locks: Path, say: Callable[[str], None]) -> list[str]:
    """Send every journal of a project.

    What was sent before is not sent again.

    Args:
        root: folder of the journals.
        uri: the tracking store as it is configured now, with its password.
        locks: folder of locks.
        say: receives one line for each journal that was sent.

    Returns:
        One problem for each journal that stays.
    """
    problems: list[str] = []
    away: set[str] = set()
    with bounded_requests():
        for folder in list_journals(root):
            try:
                journal = Journal(folder)
            except (OSError, ValueError, KeyError) as error:
                problems.append(f"{folder} cannot be read ({error}). Remove it, or put its run.json right.")
                continue
            if not journal.hold():
                problems.append(f"{folder.name}: its run still goes on, and sends this itself.")
                continue
            # The journal has no password; that of the present configuration is for the same address only.
            address = choose_address(journal.header["uri"], uri)
            # A store that is away is waited for once, however many journals there are.
            if address in away:
                problems.append(f"{folder.name} is kept: MLflow at {journal.header['uri']} is away, as said above.")
                journal.let_go()
                continue
            problem, is_away = _send(journal, address, locks=locks, say=say)
            if problem is not None:
                problems.append(problem)
                journal.let_go()
            if is_away:
                away.add(address)
    return problems


def _send(journal: Journal, address: str, *, locks: Path, say: Callable[[str], None]) -> tuple[str | None, bool]:
    """Send one journal; return what is wrong if something stays, and whether the store is away."""
    entries, files = journal.count()
    sender = Sender(journal, Delivery(journal, address, locks=locks))
    sender.start()
    all_sent = sender.wait_until_open(PATIENCE_SECONDS) and sender.finish(PATIENCE_SECONDS)
    name, shown_uri = journal.header.get("run_name") or journal.run_id, sender.shown_uri
    if all_sent:
        say(f"Sent {describe_count(entries, files)} of run '{name}' ({journal.run_id}) to {shown_uri}.")
        return None, False
    sender.abandon()
    left = describe_count(*journal.count())
    reason = sender.trouble.text if sender.trouble is not None else "it does not take them"
    return (
        f"Kept in {journal.folder}: {left} of run '{name}'. MLflow at {shown_uri}: {reason}.",
        sender.trouble is not None,
    )
