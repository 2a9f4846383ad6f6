"""Audits: does a log hold together, and did a client process what is in it, whole and in order?"""

from __future__ import annotations

from gapless.torture.audit.auditor import Report, audit, audit_session

__all__ = ["Report", "audit", "audit_session"]
