"""Operations in C, for one client on a CPU; compiled when they are first needed, where there is a compiler."""
