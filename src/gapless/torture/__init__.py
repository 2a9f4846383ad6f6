"""Fault injection for anybody's server: it speaks the wire, and knows nothing of ours."""
