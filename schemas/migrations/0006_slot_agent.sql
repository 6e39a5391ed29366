-- Whose slot it is, so that the slots of an agent are counted without its runs.
alter table slot add column agent_id uuid;
update slot set agent_id = run.agent_id from run where run.id = slot.run_id;
alter table slot alter column agent_id set not null;
