// SPDX-License-Identifier: Apache-2.0
/* kvlink for programs in C, and in every language that calls C: a worker offers blocks of its memory, and
 * pulls blocks of other workers into its own. docs/getting-started/native.md is the guide.
 *
 * Version 1 serves pools in host memory, between workers of the same tensor-parallel degree, over loopback,
 * shm, cma, tcp, and verbs with ports that the program names. What Python decides is refused by name: memory
 * of GPUs, the choice of transports and ports, layouts that are split in another way at the other end.
 *
 * Every function may be called from any thread, and returns a kvl_code. In a child that was forked after the
 * first worker or region was made, each returns KVL_FORKED and does nothing. No function calls the program
 * back. The library's threads block all signals. Arguments are read before a function returns, and not
 * afterwards; only the memory of regions stays in use.
 *
 * Structures begin with their size, which the program sets to sizeof. A library that knows less of a
 * structure refuses it if the rest is not zero, and one that knows more takes zeros. Zero in a field is its
 * default. Texts end with a zero byte, and are UTF-8.
 *
 * Functions that return bytes take (out, capacity, out_bytes). *out_bytes becomes the length. If that exceeds
 * the capacity they return KVL_BUFFER, and a call with more space returns the same bytes. */
#ifndef KVLINK_H
#define KVLINK_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define KVL_API __attribute__((visibility("default")))
#else
#define KVL_API
#endif

/* The version of this interface. A later minor version adds functions, and fields at the end of structures.
 */
#define KVL_VERSION_MAJOR 1
#define KVL_VERSION_MINOR 1 /* from 1 on: the native channel */

/* Stands for an object. A handle of a closed object stays invalid. 0 is none. */
typedef uint64_t kvl_handle;

typedef enum kvl_code {
  KVL_OK = 0,
  KVL_CONFIG = 1,                /* an argument or an option is wrong */
  KVL_LAYOUT_MISMATCH = 2,       /* the two ends describe their blocks differently */
  KVL_TRANSPORT_UNAVAILABLE = 3, /* no transport reaches the owner, or this one cannot work here */
  KVL_PEER_UNREACHABLE = 4,      /* the owner died or restarted, or the connection broke */
  KVL_ACCESS_DENIED = 5,         /* a key, a bound or a signature was refused */
  KVL_TIMEOUT = 6,               /* the deadline passed; no late byte lands */
  KVL_CANCELLED = 7,             /* the program cancelled, or closed the worker; no late byte lands */
  KVL_STALE_BLOCKS = 8,          /* the lease ended before the read did: do not use the bytes */
  KVL_BUFFER = 32,               /* the space for bytes is too small */
  KVL_HANDLE = 33,               /* no such object, it is closed, or it is of another kind */
  KVL_FORKED = 34,               /* this process was forked from the one that uses kvlink */
  KVL_MEMORY = 35,               /* the process is out of memory */
  KVL_INTERNAL = 36,             /* kvlink has a bug; please report the sentence */
  KVL_PENDING = 37,              /* the pull has not ended */
  KVL_ENDED = 38                 /* the offer has ended */
} kvl_code;

/* Says in a sentence what failed, where, and what to do. Every function takes NULL in its place. */
typedef struct kvl_error {
  uint32_t size;
  int32_t code;
  uint32_t stale; /* with KVL_STALE_BLOCKS: 1 settled, 2 expired, 3 aborted, 4 evicted, 5 reused, 6 never
                     granted, 7 restarted */
  char text[1012];
} kvl_error;

typedef struct kvl_about_info {
  uint32_t size;
  uint32_t version_major, version_minor; /* of the library's interface */
  uint32_t protocol_version;             /* which both ends of a connection must share */
} kvl_about_info;

/* Tells which library the program has. */
KVL_API int32_t kvl_about(kvl_about_info* about, kvl_error* error);

/* Regions: memory that blocks are in. A region may be closed after every worker that has it was closed. */

enum { KVL_REGION_HUGE_PAGES = 1 };

/* Allocates zeroed memory that other processes of this host can map: the transport shm needs it. */
KVL_API int32_t kvl_region_alloc(uint64_t bytes, uint32_t flags, kvl_handle* region, void** base,
                                 kvl_error* error);
/* Takes memory of the program, which stays valid until the region was closed. shm does not reach it. */
KVL_API int32_t kvl_region_wrap(void* base, uint64_t bytes, kvl_handle* region, kvl_error* error);

/* Workers: one has the blocks of one model, offers them and pulls into them. */

enum {
  KVL_WORKER_CHANNEL = 1 /* listens for readers that connect by kvl_peer_connect, or in Python */
};

typedef struct kvl_worker_options {
  uint32_t size;
  uint32_t flags;
  const char* worker_id; /* unique among the workers that meet */
  const char*
      transports;   /* best first, "shm,cma,tcp"; NULL: these, and verbs before tcp where ports are named */
  const char* host; /* the address that sockets bind; NULL: 127.0.0.1 */
  const char* advertise; /* the address that peers dial instead; NULL: the same */
  const char* agent; /* host:port for the card, of a server that answers readers by kvl_answer; NULL: none */
  const char* nics;  /* ports for verbs, "mlx5_0:1,mlx5_1:1"; NULL: none */
  const char*
      ticket_keys; /* secrets, one a line: the first signs tickets, and tickets are read that one signed */
  uint64_t epoch;  /* grows with each start of a worker of this name; 0: from the clock */
  uint32_t port;   /* of tcp; 0: any */
  uint32_t num_lease_slots;      /* readers that may hold leases at a time; 0: 4096 */
  uint32_t num_progress_threads; /* 0: 1 */
  uint32_t num_lanes;            /* of a connection; 0: as many as the transport needs */
  uint64_t inline_us;            /* pulls that should take no longer run on the calling thread; 0: 500 */
  uint32_t channel_port;         /* of KVL_WORKER_CHANNEL, at `host`; 0: any */
  uint32_t reserved;
} kvl_worker_options;

/* One layer's K, or V, or both side by side. This structure never changes. */
typedef struct kvl_plane {
  uint32_t region; /* the number that kvl_worker_add_region returned */
  uint32_t layer;
  uint64_t offset; /* bytes from the start of the region to block 0 */
} kvl_plane;

enum { KVL_LAYOUT_STATE = 1 /* a block is one state of fixed size, and block_tokens is 1 */ };

/* Row (block, token, head) has row_bytes bytes and starts at
 * plane.offset + block * block_stride + token * token_stride + (head - first_head) * head_stride. */
typedef struct kvl_layout {
  uint32_t size;
  uint32_t flags;
  const char* model; /* must be equal at both ends, unless one is empty; NULL: empty */
  const char* dtype; /* must be equal at both ends */
  uint32_t num_blocks, block_tokens;
  uint32_t total_heads;           /* KV heads of the whole model, 1 for MLA */
  uint32_t first_head, num_heads; /* those that this worker holds */
  uint32_t row_bytes;
  uint64_t block_stride, token_stride, head_stride; /* bytes */
  const kvl_plane* planes;                          /* in model order */
  uint32_t num_planes;
  uint32_t tp_rank, tp_size; /* tp_size 0: 1 */
  uint32_t reserved;
} kvl_layout;

/* Makes a worker, whose regions and groups come next. */
KVL_API int32_t kvl_worker_open(const kvl_worker_options* options, kvl_handle* worker, kvl_error* error);
/* Adds memory that peers may read and pulls write. *index is its number for kvl_plane. */
KVL_API int32_t kvl_worker_add_region(kvl_handle worker, kvl_handle region, uint32_t* index,
                                      kvl_error* error);
/* Adds a cache group: most models have one. */
KVL_API int32_t kvl_worker_add_group(kvl_handle worker, const kvl_layout* layout, kvl_error* error);
/* Registers the memory and starts the threads. A failure leaves the worker to be closed. */
KVL_API int32_t kvl_worker_start(kvl_handle worker, kvl_error* error);
/* Returns the sealed card that readers need, as the control plane of kvlink sends it. It has secrets. */
KVL_API int32_t kvl_worker_card(kvl_handle worker, void* out, uint64_t capacity, uint64_t* out_bytes,
                                kvl_error* error);
/* Answers a message of kvl_peer_step, or of a reader in Python: a ConnectRequest of the worker agent. May
 * block for seconds. `caller` tells readers of different hosts or processes apart, of which none may use up
 * what is for all. On a refusal it returns why, and an answer that tells the reader, too. */
KVL_API int32_t kvl_answer(kvl_handle worker, uint64_t caller, const void* message, uint64_t message_bytes,
                           void* out, uint64_t capacity, uint64_t* out_bytes, kvl_error* error);

typedef struct kvl_worker_stats {
  uint32_t size;
  uint32_t reserved;
  uint64_t active_leases;                      /* one for each offer that has not ended */
  uint64_t granted, settled, expired, aborted; /* since the start */
} kvl_worker_stats;

/* Counts the leases of a worker. */
KVL_API int32_t kvl_worker_count(kvl_handle worker, kvl_worker_stats* stats, kvl_error* error);

enum {
  KVL_EVENT_PULL_ENDED = 1,
  KVL_EVENT_OFFER_ENDED = 2,
  KVL_EVENT_PEER_CONNECTED = 3 /* or not: of kvl_peer_connect */
};

typedef struct kvl_event {
  uint32_t size; /* the program sets that of the first, which counts for all */
  uint32_t kind;
  kvl_handle handle;
  uint64_t user; /* of the options */
  /* how a pull or connecting ended; of an offer: KVL_OK settled, KVL_TIMEOUT expired, KVL_CANCELLED aborted
   */
  int32_t code;
  uint32_t reserved;
} kvl_event;

/* Returns a descriptor that is readable while kvl_events has something. It belongs to the worker. */
KVL_API int32_t kvl_event_fd(kvl_handle worker, int32_t* fd, kvl_error* error);
/* Returns at most `capacity` events. The blocks of an offer may be written again from its event on, those of
 * a pull may be read. Pulls with KVL_PULL_NOTIFY have events, peers with kvl_peer_connect, and offers unless
 * their program dropped the handle. */
KVL_API int32_t kvl_events(kvl_handle worker, kvl_event* events, uint32_t capacity, uint32_t* num_events,
                           kvl_error* error);

/* Peers: owners that a worker reads from. */

/* Makes a peer from the card of its worker. `timeout_us` is that of each step, or of kvl_peer_connect; 0: 10
 * s. */
KVL_API int32_t kvl_peer_open(kvl_handle worker, const void* card, uint64_t card_bytes, uint64_t timeout_us,
                              kvl_handle* peer, kvl_error* error);
/* Connects, step by step. The first call has no input. While *out_bytes is not 0, the program carries the
 * bytes to the owner's kvl_answer, and passes the answer to the next call, or nothing if there was none.
 * *out_bytes is 0 when the peer is connected. There are at most as many answers as transports. May block
 * until the timeout. */
KVL_API int32_t kvl_peer_step(kvl_handle peer, const void* answer, uint64_t answer_bytes, void* out,
                              uint64_t capacity, uint64_t* out_bytes, kvl_error* error);
/* Begins to connect by the owner's native channel, on threads of the library, in place of kvl_peer_step. An
 * event tells how that ended. From then on the pulls of the peer end as soon as the owner's process does.
 * KVL_CONFIG if the card has no channel. */
KVL_API int32_t kvl_peer_connect(kvl_handle peer, uint64_t user, kvl_error* error);
/* Waits until a peer that kvl_peer_connect connects is connected, or returns why it is not; KVL_PENDING after
 * the time. UINT64_MAX: as long as it takes. */
KVL_API int32_t kvl_peer_wait(kvl_handle peer, uint64_t timeout_us, kvl_error* error);

/* Offers: blocks that stay as they are until their readers have read them, or their time is up. */

enum { KVL_READY_BLOCKS = 0, KVL_READY_LAYERS = 1, KVL_READY_TOKENS = 2 };
enum { KVL_OFFER_STREAM = 1 /* only `ready` units are written; kvl_offer_set_ready tells of more */ };

typedef struct kvl_offer_options {
  uint32_t size;
  uint32_t flags;
  const char* request_id;
  const uint32_t* blocks;       /* of all groups, one after the other */
  const uint32_t* group_blocks; /* how many each group has; NULL with one group */
  const uint32_t* group_tokens; /* how many tokens each group keeps; NULL: num_tokens */
  uint32_t num_blocks;
  uint32_t num_groups; /* 0: 1 */
  uint32_t num_tokens; /* that the blocks hold; the last block may be partial */
  uint32_t readers;    /* 0: 1 */
  uint32_t ready_unit; /* several groups count tokens */
  uint32_t ready;
  uint64_t ttl_us; /* until the offer expires; 0: 30 s */
  uint64_t user;
} kvl_offer_options;

/* Offers blocks. An event tells when the offer has ended. */
KVL_API int32_t kvl_offer_open(kvl_handle worker, const kvl_offer_options* options, kvl_handle* offer,
                               kvl_error* error);
/* Returns the ticket, which goes to the reader. Who has it may read the blocks. */
KVL_API int32_t kvl_offer_ticket(kvl_handle offer, void* out, uint64_t capacity, uint64_t* out_bytes,
                                 kvl_error* error);
/* Says that so many units are written. The number never decreases. */
KVL_API int32_t kvl_offer_set_ready(kvl_handle offer, uint64_t ready, kvl_error* error);
/* Lets the offer expire so much later than now, unless it would expire later. */
KVL_API int32_t kvl_offer_extend(kvl_handle offer, uint64_t ttl_us, kvl_error* error);
/* Takes the offer back: reads that have not ended fail. Its event follows. */
KVL_API int32_t kvl_offer_abort(kvl_handle offer, kvl_error* error);

/* Tickets and pulls. */

typedef struct kvl_ticket_info {
  uint32_t size;
  uint32_t num_blocks, num_groups, num_tokens, num_readers;
  uint32_t ready, ready_unit;
  uint32_t reserved;
  uint64_t epoch;
  uint64_t ttl_us;
  char worker_id[520], request_id[520];
} kvl_ticket_info;

/* Says what a ticket is for. */
KVL_API int32_t kvl_ticket_read(const void* ticket, uint64_t ticket_bytes, kvl_ticket_info* info,
                                kvl_error* error);

enum {
  KVL_PULL_NOTIFY = 1,   /* an event follows when the pull has ended */
  KVL_PULL_NO_SETTLE = 2 /* the offer goes on, for this reader to read again */
};

typedef struct kvl_pull_options {
  uint32_t size;
  uint32_t flags;
  kvl_handle peer;
  kvl_handle plan; /* of kvl_plan_make; then the blocks below are not read */
  const void* ticket;
  uint64_t ticket_bytes;
  const uint32_t* blocks;       /* of this worker, where the bytes go: of all groups, one after the other */
  const uint32_t* group_blocks; /* how many each group has; NULL with one group */
  uint32_t num_blocks;
  uint32_t num_groups;             /* 0: 1 */
  uint32_t first_token, end_token; /* of the request; both 0: all */
  uint32_t first_layer, end_layer; /* with one group; both 0: all */
  uint32_t seat;                   /* which of the readers this is, from 0 on */
  uint32_t num_readers;            /* how many there are; 0: as many as the ticket is for */
  uint64_t timeout_us;             /* 0: 30 s */
  uint64_t user;
} kvl_pull_options;

/* Plans a pull that does not stream, for pulls under later tickets of the same blocks. Valid while the peer
 * is. */
KVL_API int32_t kvl_plan_make(const kvl_pull_options* options, kvl_handle* plan, kvl_error* error);
/* Starts a pull, which has the blocks of this worker until it ended. Small ones have ended on return. With
 * NULL in place of `pull` it returns when the pull has ended, and how. */
KVL_API int32_t kvl_pull_start(const kvl_pull_options* options, kvl_handle* pull, kvl_error* error);
/* Waits until the pull has ended, and returns how; KVL_PENDING after the time. UINT64_MAX: as long as it
 * takes. */
KVL_API int32_t kvl_pull_wait(kvl_handle pull, uint64_t timeout_us, kvl_error* error);
/* Ends the pull. On return no byte of it lands any more. */
KVL_API int32_t kvl_pull_cancel(kvl_handle pull, kvl_error* error);

typedef struct kvl_pull_stats {
  uint32_t size;
  uint32_t settled; /* 1: the owner was told */
  uint64_t bytes, num_reads;
  uint64_t proven_units; /* of a stream: what has landed and validated, also after a failure */
  uint64_t total_ns, plan_ns, read_ns, validate_ns, settle_ns;
} kvl_pull_stats;

/* Tells what a pull has read and how long it took. */
KVL_API int32_t kvl_pull_count(kvl_handle pull, kvl_pull_stats* stats, kvl_error* error);
/* Settles a reader's seat without reading. */
KVL_API int32_t kvl_release(const kvl_pull_options* options, kvl_error* error);

/* For every object. */

/* Returns a text for people: the path of a peer and why others were refused, the transports of a worker, or
 * how a pull went. */
KVL_API int32_t kvl_explain(kvl_handle object, char* out, uint64_t capacity, uint64_t* out_bytes,
                            kvl_error* error);
/* Closes an object. A worker ends all its pulls and offers, and with it the handles of its peers, plans,
 * offers and pulls become invalid. A peer ends its pulls. A pull or an offer goes on, without a handle: the
 * blocks of such a pull belong to it until its worker or peer was closed. */
KVL_API int32_t kvl_close(kvl_handle object, kvl_error* error);

#ifdef __cplusplus
}
#endif

#endif
