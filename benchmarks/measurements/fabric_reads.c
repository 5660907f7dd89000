// SPDX-License-Identifier: Apache-2.0
// The rate of libfabric without kvlink, to compare with `kvlink bench pull --transport fabric`: one process reads
// blocks of another in random order by fi_read, with as many under way as kvlink has. The other does nothing but
// poll its completion queue.
//
//   cc -O2 -o fabric_reads fabric_reads.c -lfabric
//   fabric_reads PROVIDER BLOCK_BYTES BLOCKS ITERS      # one line of JSON
#define _GNU_SOURCE
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { kUnderWay = 64, kNameBytes = 256 };

struct end {
  struct fi_info* info;
  struct fid_fabric* fabric;
  struct fid_domain* domain;
  struct fid_cq* queue;
  struct fid_av* peers;
  struct fid_ep* endpoint;
};

struct card {
  size_t name_bytes;
  char name[kNameBytes];
  uint64_t key, base;
};

static void check(long result, const char* what) {
  if (result >= 0) return;
  fprintf(stderr, "%s: %s\n", what, fi_strerror((int)-result));
  exit(1);
}

static struct end open_end(const char* provider) {
  struct end end = {0};
  struct fi_info* hints = fi_allocinfo();
  hints->caps = FI_RMA | FI_READ | FI_REMOTE_READ;
  hints->mode = FI_CONTEXT | FI_CONTEXT2;
  hints->ep_attr->type = FI_EP_RDM;
  hints->domain_attr->threading = FI_THREAD_SAFE;
  hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT;
  hints->fabric_attr->prov_name = strdup(provider);
  check(fi_getinfo(FI_VERSION(1, 17), NULL, NULL, 0, hints, &end.info), "fi_getinfo");
  check(fi_fabric(end.info->fabric_attr, &end.fabric, NULL), "fi_fabric");
  check(fi_domain(end.fabric, end.info, &end.domain, NULL), "fi_domain");
  struct fi_cq_attr queue = {.format = FI_CQ_FORMAT_CONTEXT, .size = 2 * kUnderWay};
  check(fi_cq_open(end.domain, &queue, &end.queue, NULL), "fi_cq_open");
  struct fi_av_attr peers = {.type = FI_AV_TABLE};
  check(fi_av_open(end.domain, &peers, &end.peers, NULL), "fi_av_open");
  check(fi_endpoint(end.domain, end.info, &end.endpoint, NULL), "fi_endpoint");
  check(fi_ep_bind(end.endpoint, &end.peers->fid, 0), "fi_ep_bind");
  check(fi_ep_bind(end.endpoint, &end.queue->fid, FI_TRANSMIT | FI_RECV), "fi_ep_bind");
  check(fi_enable(end.endpoint), "fi_enable");
  return end;
}

static struct fid_mr* share(struct end* end, void* memory, size_t bytes, uint64_t access) {
  struct fid_mr* region;
  check(fi_mr_reg(end->domain, memory, bytes, access, 0, 1 + access, 0, &region, NULL), "fi_mr_reg");
  if (end->info->domain_attr->mr_mode & FI_MR_ENDPOINT) {
    check(fi_mr_bind(region, &end->endpoint->fid, 0), "fi_mr_bind");
    check(fi_mr_enable(region), "fi_mr_enable");
  }
  return region;
}

static void serve(const char* provider, size_t bytes, int socket) {
  struct end end = open_end(provider);
  char* memory = malloc(bytes);
  memset(memory, 7, bytes);
  struct fid_mr* region = share(&end, memory, bytes, FI_REMOTE_READ);
  struct card card = {.name_bytes = kNameBytes, .key = fi_mr_key(region)};
  if (end.info->domain_attr->mr_mode & FI_MR_VIRT_ADDR) card.base = (uintptr_t)memory;
  check(fi_getname(&end.endpoint->fid, card.name, &card.name_bytes), "fi_getname");
  if (send(socket, &card, sizeof card, 0) < 0) exit(1);
  for (struct fi_cq_entry entry;;) (void)fi_cq_read(end.queue, &entry, 1);
}

static double now_s(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static double cpu_s(int who) {
  struct rusage used;
  getrusage(who, &used);
  return (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
         (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec) * 1e-6;
}

static void read_all(struct end* end, fi_addr_t owner, const struct card* card, char* into, void* desc,
                     const size_t* order, size_t block_bytes, size_t blocks, struct fi_context2* contexts) {
  size_t posted = 0, ended = 0;
  while (ended < blocks) {
    while (posted < blocks && posted - ended < kUnderWay) {
      const size_t at = order[posted] * block_bytes;
      const long taken = fi_read(end->endpoint, into + at, block_bytes, desc, owner, card->base + at, card->key,
                                 &contexts[posted]);
      if (taken == -FI_EAGAIN) break;
      check(taken, "fi_read");
      ++posted;
    }
    struct fi_cq_entry entries[16];
    const long count = fi_cq_read(end->queue, entries, 16);
    if (count != -FI_EAGAIN) check(count, "fi_cq_read");
    if (count > 0) ended += (size_t)count;
  }
}

static int ascending(const void* a, const void* b) {
  const double difference = *(const double*)a - *(const double*)b;
  return (difference > 0) - (difference < 0);
}

int main(int count, char** words) {
  if (count != 5) return fprintf(stderr, "usage: fabric_reads PROVIDER BLOCK_BYTES BLOCKS ITERS\n"), 2;
  const size_t block_bytes = strtoul(words[2], NULL, 10), blocks = strtoul(words[3], NULL, 10);
  const size_t iters = strtoul(words[4], NULL, 10), bytes = block_bytes * blocks;
  int sockets[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, sockets) != 0) return 1;
  const pid_t owner_process = fork();
  if (owner_process == 0) serve(words[1], bytes, sockets[1]);
  struct card card;
  if (recv(sockets[0], &card, sizeof card, 0) != sizeof card) return 1;
  struct end end = open_end(words[1]);
  char* into = calloc(1, bytes);
  void* desc = NULL;
  if (end.info->domain_attr->mr_mode & FI_MR_LOCAL) desc = fi_mr_desc(share(&end, into, bytes, FI_READ));
  fi_addr_t owner;
  check(fi_av_insert(end.peers, card.name, 1, &owner, 0, NULL) - 1, "fi_av_insert");
  size_t* order = malloc(blocks * sizeof *order);
  for (size_t i = 0; i < blocks; ++i) order[i] = i;
  for (size_t i = blocks; i > 1; --i) {
    const size_t other = (size_t)rand() % i, swapped = order[i - 1];
    order[i - 1] = order[other];
    order[other] = swapped;
  }
  struct fi_context2* contexts = calloc(blocks, sizeof *contexts);
  double* times = malloc(iters * sizeof *times);
  read_all(&end, owner, &card, into, desc, order, block_bytes, blocks, contexts);  // connects
  const double began_cpu = cpu_s(RUSAGE_SELF), began = now_s();
  for (size_t i = 0; i < iters; ++i) {
    const double start = now_s();
    read_all(&end, owner, &card, into, desc, order, block_bytes, blocks, contexts);
    times[i] = now_s() - start;
  }
  const double cpu = cpu_s(RUSAGE_SELF) - began_cpu, whole = now_s() - began;
  const int right = into[0] == 7 && memcmp(into, into + 1, bytes - 1) == 0;
  kill(owner_process, SIGKILL);
  waitpid(owner_process, NULL, 0);
  qsort(times, iters, sizeof *times, ascending);
  const double gib = (double)(bytes * iters) / (1 << 30);
  printf("{\"provider\": \"%s\", \"block_bytes\": %zu, \"blocks\": %zu, \"iters\": %zu, \"min_us\": %.1f, "
         "\"p50_us\": %.1f, \"gib_per_s\": %.3f, \"reader_cpu_s_per_gib\": %.3f, \"owner_polls_s_per_gib\": %.3f, "
         "\"verified\": %s}\n",
         words[1], block_bytes, blocks, iters, times[0] * 1e6, times[iters / 2] * 1e6,
         (double)bytes / (1 << 30) / times[iters / 2], cpu / gib, whole / gib, right ? "true" : "false");
  return !right;
}
