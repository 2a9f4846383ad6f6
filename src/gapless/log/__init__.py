"""Durable logs, opened by URL."""

from gapless.log.base import Log
from gapless.log.open import open_log

__all__ = ["Log", "open_log"]
