"""How a student is compared with its teacher."""
