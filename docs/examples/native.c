// SPDX-License-Identifier: Apache-2.0
/* Two processes in C: the first offers three blocks, the second pulls them into its own and compares every
 * byte.
 *
 *   cc -std=c11 native.c $(pkg-config --cflags --libs kvlink) && ./a.out
 *
 * A pair of sockets carries what a real program sends with its own messages: the card, the messages that
 * connect, and the ticket. */
#define _GNU_SOURCE
#include <kvlink.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { BLOCKS = 64, TOKENS = 16, HEADS = 2, ROW = 128, LAYERS = 4, PLANES = 2 * LAYERS };
enum { PLANE_BLOCK = TOKENS * HEADS * ROW, PLANE = BLOCKS * PLANE_BLOCK, MOST_MESSAGE = 1 << 16 };

static kvl_error error = {.size = sizeof error};
static char message[MOST_MESSAGE];

static void check(int32_t code) {
  if (code == KVL_OK) return;
  fprintf(stderr, "%s (code %d)\n", error.text, code);
  exit(1);
}

/* The packets of this socket keep their bounds, so each is one message. */
static void send_message(int to, uint64_t bytes) {
  if (send(to, message, bytes, 0) != (ssize_t)bytes) exit(2);
}

static uint64_t receive(int from) {
  const ssize_t got = recv(from, message, sizeof message, 0);
  if (got < 0) exit(2);
  return (uint64_t)got;
}

/* Makes a worker with one region, whose memory is at *base: planes one after the other, each with all blocks.
 */
static kvl_handle make_worker(const char* name, unsigned char** base) {
  kvl_handle region, worker;
  uint32_t index;
  check(kvl_region_alloc((uint64_t)PLANES * PLANE, 0, &region, (void**)base, &error));
  const kvl_worker_options options = {.size = sizeof options, .worker_id = name};
  check(kvl_worker_open(&options, &worker, &error));
  check(kvl_worker_add_region(worker, region, &index, &error));
  kvl_plane planes[PLANES];
  for (uint32_t plane = 0; plane < PLANES; ++plane) {
    planes[plane] = (kvl_plane){.region = index, .layer = plane / 2, .offset = (uint64_t)plane * PLANE};
  }
  const kvl_layout layout = {.size = sizeof layout,
                             .model = "example",
                             .dtype = "bfloat16",
                             .num_blocks = BLOCKS,
                             .block_tokens = TOKENS,
                             .total_heads = HEADS,
                             .num_heads = HEADS,
                             .row_bytes = ROW,
                             .block_stride = PLANE_BLOCK,
                             .token_stride = HEADS * ROW,
                             .head_stride = ROW,
                             .planes = planes,
                             .num_planes = PLANES};
  check(kvl_worker_add_group(worker, &layout, &error));
  check(kvl_worker_start(worker, &error));
  return worker;
}

static unsigned char byte_at(uint32_t plane, uint32_t block, uint32_t at) {
  return (unsigned char)(plane * 3 + block * 5 + at * 7);
}

static void owner(int peer) {
  unsigned char* pool;
  uint64_t bytes;
  const kvl_handle worker = make_worker("prefill-0", &pool);
  for (uint32_t at = 0; at < (uint32_t)PLANES * PLANE; ++at) {
    pool[at] = byte_at(at / PLANE, at % PLANE / PLANE_BLOCK, at % PLANE_BLOCK);
  }
  check(kvl_worker_card(worker, message, sizeof message, &bytes, &error));
  send_message(peer, bytes);
  while ((bytes = receive(peer)) > 1) { /* a byte says that the reader is connected */
    static char answer[MOST_MESSAGE];
    /* It may refuse: the answer says so to the reader, too. */
    kvl_answer(worker, 1, message, bytes, answer, sizeof answer, &bytes, &error);
    memcpy(message, answer, bytes);
    send_message(peer, bytes);
  }
  const uint32_t blocks[] = {5, 9, 2};
  const kvl_offer_options options = {.size = sizeof options,
                                     .request_id = "request-42",
                                     .blocks = blocks,
                                     .num_blocks = 3,
                                     .num_tokens = 3 * TOKENS};
  kvl_handle offer;
  check(kvl_offer_open(worker, &options, &offer, &error));
  check(kvl_offer_ticket(offer, message, sizeof message, &bytes, &error));
  send_message(peer, bytes);
  struct pollfd readable = {.events = POLLIN};
  kvl_event event = {.size = sizeof event};
  uint32_t number = 0;
  check(kvl_event_fd(worker, &readable.fd, &error));
  while (number == 0) {
    poll(&readable, 1, -1);
    check(kvl_events(worker, &event, 1, &number, &error));
  }
  printf("owner: the offer was %s, and its blocks may be written again\n",
         event.code == KVL_OK ? "settled" : "lost");
  check(kvl_close(worker, &error));
}

static void reader(int peer) {
  unsigned char* pool;
  static char answer[MOST_MESSAGE];
  uint64_t bytes = receive(peer), answered = 0;
  const kvl_handle worker = make_worker("decode-0", &pool);
  kvl_handle from;
  check(kvl_peer_open(worker, message, bytes, 0, &from, &error));
  for (;;) {
    check(kvl_peer_step(from, answer, answered, message, sizeof message, &bytes, &error));
    if (bytes == 0) break;
    send_message(peer, bytes);
    answered = receive(peer);
    memcpy(answer, message, answered);
  }
  message[0] = '.';
  send_message(peer, 1);
  bytes = receive(peer); /* the ticket */
  const uint32_t theirs[] = {5, 9, 2}, into[] = {0, 1, 2};
  const kvl_pull_options options = {.size = sizeof options,
                                    .peer = from,
                                    .ticket = message,
                                    .ticket_bytes = bytes,
                                    .blocks = into,
                                    .num_blocks = 3};
  kvl_handle pull;
  check(kvl_pull_start(&options, &pull, &error));
  check(kvl_pull_wait(pull, UINT64_MAX, &error)); /* KVL_STALE_BLOCKS: compute the request again */
  for (uint32_t plane = 0; plane < PLANES; ++plane) {
    for (uint32_t at = 0; at < 3 * PLANE_BLOCK; ++at) {
      const unsigned char expected = byte_at(plane, theirs[at / PLANE_BLOCK], at % PLANE_BLOCK);
      if (pool[plane * PLANE + at] != expected) exit(3);
    }
  }
  check(kvl_explain(pull, answer, sizeof answer, &bytes, &error));
  printf("reader: %s\n", answer);
  check(kvl_close(worker, &error));
}

int main(void) {
  int ends[2], status;
  setvbuf(stdout, NULL, _IOLBF, 0);
  if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends) != 0) return 2;
  const pid_t child = fork(); /* before the first worker: a later child could not use the library */
  if (child == 0) {
    close(ends[0]);
    reader(ends[1]);
    return 0;
  }
  close(ends[1]);
  owner(ends[0]);
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}
