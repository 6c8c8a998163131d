"""Operations in C for one client on a CPU. They are compiled at first use, if there is a compiler."""
