"""Meta-World: fifty tasks of one arm above a table, told apart by nothing but what is asked for."""
