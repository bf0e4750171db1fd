"""Operations of few rows: what Inductor has faster kernels for, and fewer."""
