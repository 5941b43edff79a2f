"""Five plug-ins for Kedge, as a package of its own."""
