// Placed before and after code that teams of a work-group run independently on NVIDIA, as work-groups do elsewhere: in
// between, the work-items of a team look like a work-group, and barriers are those of the team.

#ifndef TEAMS_PER_GROUP
#define TEAMS_PER_GROUP (ITEMS / TEAM)
uint team_item(void) { return get_local_id(0) % TEAM; }

void team_barrier(void) {
    asm volatile("bar.sync %0, %1;" ::"r"((uint)(1 + get_local_id(0) / TEAM)), "n"(TEAM) : "memory");
}

#define WG TEAM
#define get_local_id(dimension) team_item()
#define barrier(fences) team_barrier()
#else
#undef WG
#define WG ITEMS
#undef get_local_id
#undef barrier
#endif
