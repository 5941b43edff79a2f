"""A critic or groups, by length of episode: docs/records/critic-or-groups.md."""
