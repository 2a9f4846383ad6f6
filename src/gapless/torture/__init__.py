"""Fault injection for anybody's server, over the wire; and audits of logs at rest."""
