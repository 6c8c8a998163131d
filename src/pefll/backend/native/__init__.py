"""Operations in C for one client on a CPU, compiled at first use if there is a compiler."""
