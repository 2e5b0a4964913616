package org.antigravity;

import androidx.annotation.NonNull;

/** A failure in one line, which names the argument, the file or the option, and the remedy. */
public final class AntigravityException extends RuntimeException {
    /** Exit code of the same failure of the program: 2 usage, 3 model, 4 memory, 5 device, 130 cancelled, 1 other. */
    public final int status;

    AntigravityException(int status, @NonNull String message) {
        super(message);
        this.status = status;
    }
}
