/* antigravity: one language model as a library. Written by `cargo xtask header` from src/ffi; do not edit.
 *
 * Texts are UTF-8 with a length in bytes and need no byte 0 at the end; only what antigravity_version,
 * antigravity_model_info and antigravity_last_error return ends with one. Every pointer to an input or to a place for a
 * result may be NULL only where that is said. Nothing else may write it during the call, and nothing keeps it
 * afterwards.
 *
 * Functions return a status: ANTIGRAVITY_OK or an error, whose message antigravity_last_error returns.
 *
 * Handles are checked: NULL, a freed or a foreign one is an error. An engine can be used by any number of threads at
 * the same time, and freed in any order with its sessions. A session can move between threads, but only one call at a time
 * may use it: a second one is an error. Only antigravity_cancel and antigravity_session_free may be called meanwhile.
 * Threads need 2 MiB of stack. The library must not be unloaded. After fork, a child must not use it.
 */
#ifndef ANTIGRAVITY_H
#define ANTIGRAVITY_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Version of the functions and types in this header. It rises when one of them changes its meaning. */
#define ANTIGRAVITY_ABI_VERSION 1

/* The call did what it should. */
#define ANTIGRAVITY_OK 0

/* Any other failure, such as a file that cannot be written. */
#define ANTIGRAVITY_ERROR 1

/* An argument or an option is wrong. */
#define ANTIGRAVITY_ERROR_USAGE 2

/* The model or its tokenizer cannot be used. */
#define ANTIGRAVITY_ERROR_MODEL 3

/* There is not enough memory. */
#define ANTIGRAVITY_ERROR_MEMORY 4

/* The device is missing or failed. */
#define ANTIGRAVITY_ERROR_DEVICE 5

/* The call was cancelled before its first token. */
#define ANTIGRAVITY_ERROR_CANCELLED 130

/* A loaded model. */
typedef struct antigravity_engine antigravity_engine;

/* Memory in bytes that a model needs, and that the system has for it. */
typedef struct antigravity_memory {
    /* Memory that must be available, or loading fails. */
    uint64_t needed;
    /* Upper bound of the process's resident memory. */
    uint64_t peak;
    /* Memory that is available; UINT64_MAX if the system does not tell. */
    uint64_t available;
} antigravity_memory;

/* The ABI version of the library: compare it with ANTIGRAVITY_ABI_VERSION. */
uint32_t antigravity_abi_version(void);

/* The version of the library, as `antigravity --version` prints it. */
const char *antigravity_version(void);

/* Facts about the model that the library is built for, as a JSON object. */
const char *antigravity_model_info(void);

/* The message of the last call of this thread that failed: one line, valid until the thread's next call. It names the
 * argument, the file or the option, and the remedy. */
const char *antigravity_last_error(void);

/* Tells how much memory a model will need, without loading it. Arguments as of antigravity_load. */
int32_t antigravity_plan(
    const char *model,
    size_t model_length,
    const char *options,
    size_t options_length,
    antigravity_memory *memory);

/* Loads a model: a directory, a .gguf file, a packed file or a bundle. NULL is the model inside the file of this
 * library, or of the program it is linked into, where `antigravity bundle --program` put it. The options are a JSON
 * object with the flags of `antigravity generate` about model, device and cache, such as {"max_seq_len": 4096,
 * "backend": "auto"}, and `chat_template`; NULL takes the defaults. */
int32_t antigravity_load(
    const char *model,
    size_t model_length,
    const char *options,
    size_t options_length,
    antigravity_engine **engine);

/* Loads a model from a part of an open file, such as an asset that is stored uncompressed in an Android package: a
 * GGUF file, or a file that `antigravity bundle --no-program` wrote. A length of 0 means to the end of the file. The
 * descriptor may be closed afterwards. */
int32_t antigravity_load_fd(
    int32_t fd,
    uint64_t offset,
    uint64_t length,
    const char *options,
    size_t options_length,
    antigravity_engine **engine);

/* Frees a model. Its sessions stay usable, and keep its memory until they are freed. NULL is fine. */
int32_t antigravity_free(antigravity_engine *engine);

/* Turns a text into token ids. If `add_special` is not 0, they begin with the tokens that the model wants before a
 * prompt. `count` receives their number, even if `buffer` is too small, which is an error. */
int32_t antigravity_tokenize(
    antigravity_engine *engine,
    const char *text,
    size_t text_length,
    int32_t add_special,
    uint32_t *buffer,
    size_t capacity,
    size_t *count);

/* Turns token ids into text, special tokens included. `count` receives its number of bytes, even if `buffer` is too
 * small, which is an error. No byte 0 is added. */
int32_t antigravity_detokenize(
    antigravity_engine *engine,
    const uint32_t *ids,
    size_t ids_length,
    char *buffer,
    size_t capacity,
    size_t *count);

/* Computes one vector of length 1 for each text of a JSON array of strings. The options are a JSON object with
 * `pooling` (mean, cls or last; the default is what the model's files say) and `dimensions`; NULL takes the defaults.
 * `buffer` receives the vectors one after another: give it room for `hidden_size` values a text. `count` receives the
 * number of values. */
int32_t antigravity_embed(
    antigravity_engine *engine,
    const char *texts,
    size_t texts_length,
    const char *options,
    size_t options_length,
    float *buffer,
    size_t capacity,
    size_t *count);

/* Computes how probable each text of a JSON array of strings is behind a prompt: the sum of the natural logarithms of
 * its tokens' probabilities, without the prompt's. The first token of all has none. The prompt may be NULL. `buffer`
 * receives a number for each text, and `count` how many. */
int32_t antigravity_score(
    antigravity_engine *engine,
    const char *prompt,
    size_t prompt_length,
    const char *texts,
    size_t texts_length,
    double *buffer,
    size_t capacity,
    size_t *count);

/* A piece of text. */
#define ANTIGRAVITY_PIECE_TEXT 0

/* A piece of a reasoning model's thoughts. */
#define ANTIGRAVITY_PIECE_THOUGHT 1

/* A whole tool call: a JSON object with `id`, `name` and `arguments`, the text of a JSON object. */
#define ANTIGRAVITY_PIECE_TOOL_CALL 2

/* The model ended the text. */
#define ANTIGRAVITY_STOP_EOS 0

/* A stop string came. */
#define ANTIGRAVITY_STOP_STRING 1

/* The text has the maximum number of tokens. */
#define ANTIGRAVITY_STOP_LENGTH 2

/* The context is full. */
#define ANTIGRAVITY_STOP_CONTEXT 3

/* The text was cancelled. */
#define ANTIGRAVITY_STOP_CANCELLED 4

/* One sequence of tokens and its cache. */
typedef struct antigravity_session antigravity_session;

/* Receives the pieces of a text on the thread of the call: UTF-8, whole characters, without a byte 0 at the end. A
 * result other than 0 cancels the text. It must not throw, and must not use the session except for antigravity_cancel. */
typedef int32_t (*antigravity_callback)(int32_t kind, const char *piece, size_t length, void *user_data);

/* End and numbers of a text. */
typedef struct antigravity_result {
    /* One of ANTIGRAVITY_STOP_… */
    uint32_t stop_reason;
    /* Zero. */
    uint32_t reserved;
    /* Number of prompt tokens that had to be computed. */
    uint64_t prompt_tokens;
    /* Number of generated tokens. */
    uint64_t tokens;
    /* Microseconds to the first token. */
    uint64_t first_token_us;
    /* Microseconds from the first to the last token. */
    uint64_t decoding_us;
    /* Seed of the random numbers, which gives the same text again. */
    uint64_t seed;
} antigravity_result;

/* Makes an empty session. Several sessions of a model can be used at the same time, each by one thread. */
int32_t antigravity_session_new(antigravity_engine *engine, antigravity_session **session);

/* Frees a session. A call that another thread has under way is cancelled. NULL is fine. */
int32_t antigravity_session_free(antigravity_session *session);

/* Cancels the text that the session is generating, if any, from any thread. The call that generates it then returns
 * ANTIGRAVITY_OK with the stop reason ANTIGRAVITY_STOP_CANCELLED; the text can be continued. */
int32_t antigravity_cancel(antigravity_session *session);

/* Saves a session to a file, which holds either the old or the new content. `antigravity generate --session` reads it. */
int32_t antigravity_session_save(antigravity_session *session, const char *path, size_t path_length);

/* Replaces the session by the one in a file. Sessions that load the same file share the memory of its keys and values as
 * long as they do not change them, so a long system prompt is computed and saved once, and each session begins by
 * loading it. */
int32_t antigravity_session_load(antigravity_session *session, const char *path, size_t path_length);

/* Cuts a session back to its first tokens; 0 empties it. */
int32_t antigravity_session_rewind(antigravity_session *session, size_t tokens);

/* The tokens that a session holds. `count` receives their number, even if `buffer` is too small, which is an error.
 * The last token of a text that can be continued is computed, and counted, when it is continued. */
int32_t antigravity_session_tokens(antigravity_session *session, uint32_t *buffer, size_t capacity, size_t *count);

/* Completes a prompt. It is the whole text: what the session holds of it already is not computed again. NULL continues
 * the session's text where the last call stopped. The options are a JSON object with the flags of `antigravity
 * generate` about length and sampling, such as {"num_tokens": 100, "temperature": 0, "stop": ["\n"]}; NULL takes the
 * defaults. `callback` and `result` may be NULL. */
int32_t antigravity_generate(
    antigravity_session *session,
    const char *prompt,
    size_t prompt_length,
    const char *options,
    size_t options_length,
    antigravity_callback callback,
    void *user_data,
    antigravity_result *result);

/* Answers a conversation: a JSON array of messages like {"role": "user", "content": "Hi"}, from first to last. Roles
 * are system, user, assistant and tool; an assistant's message may have `tool_calls` with `id`, `name` and
 * `arguments`, and a tool's message has `tool_call_id`. What the session holds of the conversation is not computed
 * again. Options are those of antigravity_generate, and `tools` and `chat_template_kwargs` as in the API of OpenAI;
 * the defaults of sampling are the model's own, and an answer is not cut off. `callback` and `result` may be NULL. */
int32_t antigravity_chat(
    antigravity_session *session,
    const char *messages,
    size_t messages_length,
    const char *options,
    size_t options_length,
    antigravity_callback callback,
    void *user_data,
    antigravity_result *result);

#ifdef __cplusplus
}
#endif

#endif
