"""sparge inside other libraries: one module per library, imported when asked for."""
