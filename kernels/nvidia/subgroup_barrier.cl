// Put before and behind what teams of a work-group compute each for itself on NVIDIA, as work-groups do elsewhere: it sees
// the items of a team as its work-group's, and its barriers are the team's.

#ifndef OF_TEAMS
#define OF_TEAMS (ITEMS / TEAM)
uint item_of_team(void) { return get_local_id(0) % TEAM; }

void team_barrier(void) {
    asm volatile("bar.sync %0, %1;" ::"r"((uint)(1 + get_local_id(0) / TEAM)), "n"(TEAM) : "memory");
}

#define WG TEAM
#define get_local_id(dimension) item_of_team()
#define barrier(fences) team_barrier()
#else
#undef WG
#define WG ITEMS
#undef get_local_id
#undef barrier
#endif
