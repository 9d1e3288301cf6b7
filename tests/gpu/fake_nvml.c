/* A libnvidia-ml.so.1 that answers from a text file, read again at every call, so that a test can change the GPUs under a running
 * program. Built by fake.py: gcc -shared -fPIC -Wl,-soname,libnvidia-ml.so.1. $FAKE_NVML names the file; one "key value" a line:
 *   devices N              init CODE              wedge_init 1
 *   cc.I MAJOR             name.I TEXT            used.I MIB            total.I MIB (0: not supported)
 *   pids.I PID:MIB,PID:MIB (MIB -1: not available; none: not supported)
 *   graphics.I PID:MIB,... (as pids.I, for processes of graphics)
 *   util.I PERCENT         power.I MILLIWATT      ecc.I N               xid.I N
 *   lost.I 1               wedge.I 1 (the call never returns)           mig.I INSTANCES
 * Handles are the addresses of devs[]; instance J of GPU I is devs[I][J + 1]. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define GPUS 64
#define INSTANCES 8
typedef struct { int gpu, instance; } device;
static device devs[GPUS][INSTANCES];
typedef unsigned long long u64;

static int look(const char *name, int index, char *out, size_t size) {
    char key[64], line[512];
    const char *path = getenv("FAKE_NVML");
    FILE *file = path ? fopen(path, "r") : NULL;
    int found = 0;
    if (index < 0) snprintf(key, sizeof key, "%s ", name);
    else snprintf(key, sizeof key, "%s.%d ", name, index);
    while (file && fgets(line, sizeof line, file))
        if (!strncmp(line, key, strlen(key))) {
            line[strcspn(line, "\n")] = 0;
            snprintf(out, size, "%s", line + strlen(key));
            found = 1;
        }
    if (file) fclose(file);
    return found;
}
static long number(const char *name, int index, long otherwise) {
    char value[512];
    return look(name, index, value, sizeof value) ? atol(value) : otherwise;
}
static void forever(void) { for (;;) pause(); }
/* What every call on a device does first: hang, or be lost. */
static int touch(device *d) {
    if (number("wedge", d->gpu, 0)) forever();
    return number("lost", d->gpu, 0) ? 15 : 0;
}

int nvmlInit_v2(void) {
    if (number("wedge_init", -1, 0)) forever();
    return (int)number("init", -1, 0);
}
int nvmlInitWithFlags(unsigned flags) { (void)flags; return nvmlInit_v2(); }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) {
    switch (code) {
    case 0: return "Success";
    case 3: return "Not Supported";
    case 9: return "Driver Not Loaded";
    case 10: return "Timeout";
    case 15: return "GPU is lost";
    default: return "Unknown Error";
    }
}
int nvmlSystemGetDriverVersion(char *out, unsigned size) { snprintf(out, size, "999.99"); return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = (unsigned)number("devices", -1, 8); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    if (index >= GPUS || index >= (unsigned)number("devices", -1, 8)) return 2;
    devs[index][0].gpu = (int)index;
    devs[index][0].instance = -1;
    *handle = &devs[index][0];
    return touch(&devs[index][0]);
}
int nvmlDeviceGetMinorNumber(device *d, unsigned *minor) { *minor = (unsigned)d->gpu; return 0; }
int nvmlDeviceGetName(device *d, char *out, unsigned size) {
    char value[512];
    if (!look("name", d->gpu, value, sizeof value)) snprintf(value, sizeof value, "NVIDIA FAKE");
    snprintf(out, size, "%s", value);
    return 0;
}
int nvmlDeviceGetUUID(device *d, char *out, unsigned size) {
    if (d->instance < 0) snprintf(out, size, "GPU-%08d-fake", d->gpu);
    else snprintf(out, size, "MIG-%08d-%d-fake", d->gpu, d->instance);
    return 0;
}
int nvmlDeviceGetCudaComputeCapability(device *d, int *major, int *minor) {
    *major = (int)number("cc", d->gpu, 12);
    *minor = 0;
    return 0;
}
typedef struct { u64 total, free, used; } memory;
typedef struct { unsigned version; u64 total, reserved, free, used; } memory_v2;
int nvmlDeviceGetMemoryInfo(device *d, memory *m) {
    int lost = touch(d);
    long total = number("total", d->gpu, 97887);
    if (lost) return lost;
    if (!total) return 3;
    m->total = (u64)total << 20;
    m->used = ((u64)number("used", d->gpu, 3) + 600) << 20; /* version 1 counts what the driver reserves */
    m->free = m->total - m->used;
    return 0;
}
int nvmlDeviceGetMemoryInfo_v2(device *d, memory_v2 *m) {
    memory one;
    int code = nvmlDeviceGetMemoryInfo(d, &one);
    if (code) return code;
    m->total = one.total;
    m->reserved = (u64)600 << 20;
    m->used = one.used - m->reserved;
    m->free = one.free;
    return 0;
}
typedef struct { unsigned gpu, memory; } utilisation;
int nvmlDeviceGetUtilizationRates(device *d, utilisation *u) {
    u->gpu = (unsigned)number("util", d->gpu, 0);
    u->memory = 0;
    return touch(d);
}
int nvmlDeviceGetPowerUsage(device *d, unsigned *milliwatt) {
    *milliwatt = (unsigned)number("power", d->gpu, 75000);
    return touch(d);
}
typedef struct { unsigned pid; u64 used; unsigned gi, ci; } process;
#ifdef OLD_DRIVER
#define nvmlDeviceGetComputeRunningProcesses_v3 nvmlDeviceGetComputeRunningProcesses_v2
#define nvmlDeviceGetGraphicsRunningProcesses_v3 nvmlDeviceGetGraphicsRunningProcesses_v2
#endif
static int list(const char *key, device *d, unsigned *count, process *out) {
    char value[512] = "", *entry, *rest = value;
    unsigned found = 0, room = *count;
    int lost = touch(d);
    if (lost) return lost;
    look(key, d->gpu, value, sizeof value);
    if (!strcmp(value, "none")) return 3;
    while ((entry = strsep(&rest, ","))) {
        unsigned pid;
        long mib;
        if (sscanf(entry, "%u:%ld", &pid, &mib) != 2) continue;
        if (out && found < room) {
            out[found].pid = pid;
            out[found].used = mib < 0 ? ~0ULL : (u64)mib << 20;
            out[found].gi = out[found].ci = ~0U;
        }
        found++;
    }
    *count = found;
    return found > room || (found && !out) ? 7 : 0;
}
int nvmlDeviceGetComputeRunningProcesses_v3(device *d, unsigned *count, process *out) { return list("pids", d, count, out); }
int nvmlDeviceGetGraphicsRunningProcesses_v3(device *d, unsigned *count, process *out) {
    return list("graphics", d, count, out);
}
int nvmlDeviceGetCurrentClocksEventReasons(device *d, u64 *reasons) { *reasons = 1; return touch(d); }
int nvmlDeviceGetTotalEccErrors(device *d, int type, int counter, u64 *count) {
    (void)type, (void)counter;
    *count = (u64)number("ecc", d->gpu, 0);
    return touch(d);
}
int nvmlDeviceGetMigMode(device *d, unsigned *current, unsigned *pending) {
    *current = *pending = number("mig", d->gpu, 0) > 0;
    return 0;
}
int nvmlDeviceGetMaxMigDeviceCount(device *d, unsigned *count) { (void)d; *count = INSTANCES - 1; return 0; }
int nvmlDeviceGetMigDeviceHandleByIndex(device *d, unsigned index, void **handle) {
    if ((long)index >= number("mig", d->gpu, 0)) return 6;
    devs[d->gpu][index + 1].gpu = d->gpu;
    devs[d->gpu][index + 1].instance = (int)index;
    *handle = &devs[d->gpu][index + 1];
    return 0;
}
typedef struct { void *device; u64 type, data; unsigned gi, ci; } event;
int nvmlEventSetCreate(void **set) { *set = &devs; return 0; }
int nvmlEventSetFree(void *set) { (void)set; return 0; }
int nvmlDeviceRegisterEvents(device *d, u64 types, void *set) { (void)types, (void)set; return touch(d); }
int nvmlEventSetWait_v2(void *set, event *e, unsigned milliseconds) {
    (void)set;
    usleep((milliseconds < 50 ? milliseconds : 50) * 1000);
    for (int gpu = 0; gpu < GPUS; gpu++) {
        long xid = number("xid", gpu, 0);
        if (xid) {
            e->device = &devs[gpu][0];
            e->type = 8;
            e->data = (u64)xid;
            return 0;
        }
    }
    return 10;
}
