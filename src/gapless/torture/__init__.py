"""Fault injection for anybody's server over the wire, and audits of our logs; it knows nothing of ours at work."""
