"""The records that flow through training, interfaces between its components, and errors."""
