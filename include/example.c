/* Completes a prompt, then answers a question. The model is the first argument, or the one inside the library:
 *     cc example.c -I. -L. -lantigravity -o example && LD_LIBRARY_PATH=. ./example MODEL */
#include "antigravity.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int32_t print_piece(int32_t kind, const char *piece, size_t length, void *user_data) {
    (void)user_data;
    if (kind == ANTIGRAVITY_PIECE_TEXT) fwrite(piece, 1, length, stdout);
    fflush(stdout);
    return 0; /* anything else cancels the text */
}

static void check(int32_t status) {
    if (status == ANTIGRAVITY_OK) return;
    fprintf(stderr, "error: %s\n", antigravity_last_error());
    exit(status);
}

int main(int argc, char **argv) {
    const char *model = argc > 1 ? argv[1] : NULL;
    const char *options = "{\"num_tokens\": 40, \"temperature\": 0}", *prompt = "Once upon a time";
    const char *messages = "[{\"role\": \"user\", \"content\": \"Tell me of a dog.\"}]";
    size_t model_length = model ? strlen(model) : 0;
    antigravity_memory memory;
    antigravity_engine *engine;
    antigravity_session *session;
    antigravity_result result;

    check(antigravity_plan(model, model_length, NULL, 0, &memory));
    fprintf(stderr, "needs %.1f MiB\n", memory.needed / 1048576.0);
    check(antigravity_load(model, model_length, NULL, 0, &engine));
    check(antigravity_session_new(engine, &session));
    check(antigravity_generate(
        session, prompt, strlen(prompt), options, strlen(options), print_piece, NULL, &result));
    fprintf(stderr, "\n%d tokens\n", (int)result.tokens);
    check(antigravity_chat(
        session, messages, strlen(messages), options, strlen(options), print_piece, NULL, &result));
    putchar('\n');
    check(antigravity_session_free(session));
    check(antigravity_free(engine));
    return 0;
}
