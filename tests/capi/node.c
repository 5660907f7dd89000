// SPDX-License-Identifier: Apache-2.0
/* One end of a test, in C: does what its standard input says, line by line, and answers each line with one. A
 * line is a command and words; an answer is a code, and a word, in hexadecimal where it is bytes.
 * tests/capi/node.py drives it.
 */
#define _GNU_SOURCE
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "capi/kvlink.h"

enum {
  MOST_BLOB = 1 << 20,
  MOST_BLOCKS = 64,
  PLANES = 8,
  LAYERS = 4,
  BLOCK_TOKENS = 16,
  HEADS = 2,
  ROW = 64
};
enum { PLANE_BYTES = BLOCK_TOKENS * HEADS * ROW, BLOCK_BYTES = PLANES * PLANE_BYTES };

static kvl_handle worker, region;
static unsigned char* pool;
static unsigned char blob[MOST_BLOB];
static kvl_error error;

static void answer(int32_t code, const char* word) {
  printf("%d %s\n", code, code == KVL_OK || code == KVL_PENDING ? word : error.text);
  fflush(stdout);
}

static void answer_number(int32_t code, uint64_t number) {
  char word[32];
  snprintf(word, sizeof word, "%" PRIu64, number);
  answer(code, word);
}

static void answer_bytes(int32_t code, const unsigned char* bytes, uint64_t length) {
  printf("%d ", code);
  for (uint64_t at = 0; at < length; ++at) printf("%02x", bytes[at]);
  printf(" %s\n", code == KVL_OK ? "" : error.text);
  fflush(stdout);
}

static uint64_t from_hex(const char* word) {
  uint64_t length = 0;
  if (strcmp(word, "-") == 0) return 0;
  for (; word[0] && word[1] && length < MOST_BLOB; word += 2) {
    unsigned byte;
    if (sscanf(word, "%2x", &byte) != 1) break;
    blob[length++] = (unsigned char)byte;
  }
  return length;
}

static uint32_t from_list(char* word, uint32_t* numbers) {
  uint32_t count = 0;
  if (strcmp(word, "-") == 0) return 0;
  for (char* part = strtok(word, ","); part && count < MOST_BLOCKS; part = strtok(NULL, ",")) {
    numbers[count++] = (uint32_t)strtoul(part, NULL, 10);
  }
  return count;
}

static const char* or_null(const char* word) { return strcmp(word, "-") == 0 ? NULL : word; }

/* open ID TRANSPORTS AGENT KEYS BLOCKS alloc|wrap TP_RANK TP_SIZE CHANNEL_PORT|- */
static int32_t open_worker(char** words) {
  const uint32_t num_blocks = (uint32_t)strtoul(words[4], NULL, 10);
  const uint64_t bytes = (uint64_t)num_blocks * BLOCK_BYTES;
  int32_t code;
  if (strcmp(words[5], "alloc") == 0) {
    void* base;
    if ((code = kvl_region_alloc(bytes, 0, &region, &base, &error))) return code;
    pool = base;
  } else {
    pool = calloc(1, bytes);
    if ((code = kvl_region_wrap(pool, bytes, &region, &error))) return code;
  }
  const kvl_worker_options options = {.size = sizeof options,
                                      .worker_id = words[0],
                                      .transports = or_null(words[1]),
                                      .agent = or_null(words[2]),
                                      .ticket_keys = or_null(words[3]),
                                      .flags = or_null(words[8]) ? KVL_WORKER_CHANNEL : 0,
                                      .channel_port = (uint32_t)strtoul(words[8], NULL, 10)};
  if ((code = kvl_worker_open(&options, &worker, &error))) return code;
  uint32_t index;
  if ((code = kvl_worker_add_region(worker, region, &index, &error))) return code;
  kvl_plane planes[PLANES];
  for (uint32_t plane = 0; plane < PLANES; ++plane) {
    planes[plane] = (kvl_plane){index, plane / 2, (uint64_t)plane * num_blocks * PLANE_BYTES};
  }
  const uint32_t tp_size = (uint32_t)strtoul(words[7], NULL, 10),
                 tp_rank = (uint32_t)strtoul(words[6], NULL, 10);
  const kvl_layout layout = {.size = sizeof layout,
                             .model = "test",
                             .dtype = "float16",
                             .num_blocks = num_blocks,
                             .block_tokens = BLOCK_TOKENS,
                             .total_heads = HEADS * tp_size,
                             .first_head = HEADS * tp_rank,
                             .num_heads = HEADS,
                             .row_bytes = ROW,
                             .block_stride = PLANE_BYTES,
                             .token_stride = HEADS * ROW,
                             .head_stride = ROW,
                             .planes = planes,
                             .num_planes = PLANES,
                             .tp_rank = tp_rank,
                             .tp_size = tp_size};
  if ((code = kvl_worker_add_group(worker, &layout, &error))) return code;
  return kvl_worker_start(worker, &error);
}

/* fill SEED: byte `at` of the pool becomes a function of both, which node.py has as well. */
static void fill(uint64_t seed, uint64_t num_blocks) {
  for (uint64_t at = 0; at < num_blocks * BLOCK_BYTES; ++at)
    pool[at] = (unsigned char)(seed * 31 + at * 7 + at / 251);
}

/* offer ID BLOCKS TOKENS READERS READY|- UNIT TTL_US */
static void offer(char** words) {
  uint32_t blocks[MOST_BLOCKS];
  kvl_offer_options options = {.size = sizeof options, .request_id = words[0], .blocks = blocks, .user = 7};
  options.num_blocks = from_list(words[1], blocks);
  options.num_tokens = (uint32_t)strtoul(words[2], NULL, 10);
  options.readers = (uint32_t)strtoul(words[3], NULL, 10);
  options.flags = strcmp(words[4], "-") == 0 ? 0 : KVL_OFFER_STREAM;
  options.ready = (uint32_t)strtoul(words[4], NULL, 10);
  options.ready_unit = (uint32_t)strtoul(words[5], NULL, 10);
  options.ttl_us = strtoull(words[6], NULL, 10);
  kvl_handle made = 0;
  const int32_t code = kvl_offer_open(worker, &options, &made, &error);
  answer_number(code, made);
}

/* pull|plan|release PEER|PLAN TICKET BLOCKS TIMEOUT_US FLAGS SEAT NUM_READERS; now: pull and wait in one
 * call. */
static void pull(const char* command, char** words) {
  uint32_t blocks[MOST_BLOCKS];
  kvl_pull_options options = {.size = sizeof options, .blocks = blocks, .ticket = blob, .user = 9};
  const kvl_handle from = strtoull(words[0], NULL, 10);
  options.ticket_bytes = from_hex(words[1]);
  options.num_blocks = from_list(words[2], blocks);
  options.timeout_us = strtoull(words[3], NULL, 10);
  options.flags = (uint32_t)strtoul(words[4], NULL, 10);
  options.seat = (uint32_t)strtoul(words[5], NULL, 10);
  options.num_readers = (uint32_t)strtoul(words[6], NULL, 10);
  *(strcmp(command, "planned") == 0 ? &options.plan : &options.peer) = from;
  kvl_handle made = 0;
  if (strcmp(command, "plan") == 0) {
    const int32_t code = kvl_plan_make(&options, &made, &error);
    answer_number(code, made);
  } else if (strcmp(command, "release") == 0) {
    answer(kvl_release(&options, &error), "");
  } else if (strcmp(command, "now") == 0) {
    answer(kvl_pull_start(&options, NULL, &error), "");
  } else {
    const int32_t code = kvl_pull_start(&options, &made, &error);
    answer_number(code, made);
  }
}

static void events(void) {
  kvl_event found[16];
  uint32_t count = 0;
  found[0].size = sizeof found[0];
  const int32_t code = kvl_events(worker, found, 16, &count, &error);
  char text[1024] = "";
  for (uint32_t at = 0; code == KVL_OK && at < count; ++at) {
    char* const end = text + strlen(text);
    snprintf(end, sizeof text - (size_t)(end - text), "%u:%" PRIu64 ":%" PRIu64 ":%d,", found[at].kind,
             found[at].handle, found[at].user, found[at].code);
  }
  answer(code, text);
}

static void count(kvl_handle handle) {
  kvl_pull_stats stats = {.size = sizeof stats};
  const int32_t code = kvl_pull_count(handle, &stats, &error);
  char text[128];
  snprintf(text, sizeof text, "%u,%" PRIu64 ",%" PRIu64 ",%" PRIu64, stats.settled, stats.bytes,
           stats.num_reads, stats.proven_units);
  answer(code, text);
}

static void counts(void) {
  kvl_worker_stats stats = {.size = sizeof stats};
  const int32_t code = kvl_worker_count(worker, &stats, &error);
  char text[128];
  snprintf(text, sizeof text, "%" PRIu64 ",%" PRIu64 ",%" PRIu64 ",%" PRIu64 ",%" PRIu64, stats.active_leases,
           stats.granted, stats.settled, stats.expired, stats.aborted);
  answer(code, text);
}

static void on_bytes(const char* command, char** words) {
  static unsigned char out[MOST_BLOB];
  uint64_t length = 0;
  int32_t code;
  const kvl_handle handle = strtoull(words[0], NULL, 10);
  if (strcmp(command, "answer") == 0) {
    const uint64_t space = strtoull(words[2], NULL, 10);
    code = kvl_answer(worker, handle, blob, from_hex(words[1]), out, space ? space : sizeof out, &length,
                      &error);
    if (code == KVL_BUFFER) length = 0;
  } else if (strcmp(command, "step") == 0) {
    code = kvl_peer_step(handle, blob, from_hex(words[1]), out, sizeof out, &length, &error);
  } else if (strcmp(command, "ticket") == 0) {
    code = kvl_offer_ticket(handle, out, sizeof out, &length, &error);
  } else {
    code = kvl_worker_card(worker, out, sizeof out, &length, &error);
  }
  answer_bytes(code, out, length);
}

static void run(const char* command, char** words) {
  const kvl_handle handle = strtoull(words[0], NULL, 10);
  const uint64_t number = strtoull(words[1], NULL, 10);
  if (strcmp(command, "open") == 0) {
    answer(open_worker(words), "");
  } else if (strcmp(command, "fill") == 0) {
    fill(handle, number);
    answer(KVL_OK, "");
  } else if (strcmp(command, "read") == 0) {
    answer_bytes(KVL_OK, pool + handle, number);
  } else if (strcmp(command, "peer") == 0) {
    kvl_handle made = 0;
    const uint64_t length = from_hex(words[0]);
    const int32_t code = kvl_peer_open(worker, blob, length, number, &made, &error);
    answer_number(code, made);
  } else if (strcmp(command, "connect") == 0) {
    answer(kvl_peer_connect(handle, number, &error), "");
  } else if (strcmp(command, "connected") == 0) {
    answer(kvl_peer_wait(handle, number, &error), "");
  } else if (strcmp(command, "offer") == 0) {
    offer(words);
  } else if (strcmp(command, "ready") == 0) {
    answer(kvl_offer_set_ready(handle, number, &error), "");
  } else if (strcmp(command, "extend") == 0) {
    answer(kvl_offer_extend(handle, number, &error), "");
  } else if (strcmp(command, "abort") == 0) {
    answer(kvl_offer_abort(handle, &error), "");
  } else if (strcmp(command, "wait") == 0) {
    answer(kvl_pull_wait(handle, number, &error), "");
  } else if (strcmp(command, "cancel") == 0) {
    answer(kvl_pull_cancel(handle, &error), "");
  } else if (strcmp(command, "count") == 0) {
    count(handle);
  } else if (strcmp(command, "counts") == 0) {
    counts();
  } else if (strcmp(command, "events") == 0) {
    events();
  } else if (strcmp(command, "explain") == 0) {
    static char text[1 << 16];
    uint64_t length = 0;
    const int32_t code = kvl_explain(handle ? handle : worker, text, sizeof text, &length, &error);
    for (char* at = text; *at; ++at) *at = *at == '\n' ? '|' : *at;
    answer(code, text);
  } else if (strcmp(command, "close") == 0) {
    answer(kvl_close(handle ? handle : worker, &error), "");
  } else if (strcmp(command, "free") == 0) {
    answer(kvl_close(region, &error), "");
  } else if (strstr("pull planned plan release now", command)) {
    pull(command, words);
  } else {
    on_bytes(command, words);
  }
}

int main(void) {
  static char line[3 * MOST_BLOB];
  error.size = sizeof error;
  while (fgets(line, sizeof line, stdin)) {
    char* words[12];
    int count = 0;
    char* rest = line;
    for (char* word; count < 11 && (word = strsep(&rest, " \n"));) {
      if (*word) words[count++] = word;
    }
    for (int at = count; at < 12; ++at) words[at] = (char[]){"0"};
    if (count > 0) run(words[0], words + 1);
  }
  return 0;
}
