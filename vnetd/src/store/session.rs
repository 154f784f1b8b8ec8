//! One session with the store: lease, snapshot, watch, writes.

use etcd_client::{
    Client, Compare, CompareOp, EventType, GetOptions, PutOptions, Txn, TxnOp, WatchOptions, WatchResponse,
};
use std::time::Duration;
use tokio::sync::watch::Receiver;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval};
use vnet_control::overlay::record::PREFIX;
use vnet_control::overlay::{Alarm, Write};

use super::{Agent, Host, LEASE, MESSAGE_MAX, PATIENCE_MAX, REQUEST, StoreError};

/// Keys per page of a snapshot; a page above the message limit is requested again in smaller pages. etcd counts all remaining
/// keys for each page, so small pages cost it quadratic time.
const PAGE_KEYS: i64 = 5000;
/// Writes per transaction: half of etcd's limit (`--max-txn-ops`).
const WRITES_MAX: usize = 64;
/// Maximum number of concurrent transactions.
const TRANSACTIONS_MAX: usize = 4;

impl<H: Host> Agent<H> {
    /// Runs a session until it fails; `Ok` when the agent is stopped.
    pub(super) async fn session(&mut self, stop: &mut Receiver<bool>) -> Result<(), StoreError> {
        let connect = Client::connect(self.options.endpoints.clone(), Some(self.options.connect()));
        let mut client = tokio::select! {
            client = self.request(connect) => client?,
            _ = stop.changed() => return Ok(()),
        };
        let lease = tokio::select! {
            lease = self.renew_lease(&mut client) => lease?,
            _ = stop.changed() => return Ok(()),
        };
        let now_ms = self.now_ms();
        self.overlay.connected(lease, now_ms);
        let resumed = self.overlay.in_step();
        tokio::select! {
            read = self.read(&client) => read?,
            _ = stop.changed() => return Ok(()),
        }
        if !resumed {
            tracing::info!("overlay: in sync with the store at revision {}", self.revision);
        }
        let ended = tokio::select! {
            ended = self.follow(&client, lease) => ended,
            _ = stop.changed() => Ok(()),
        };
        if ended.is_ok() {
            self.leave(client, lease).await;
        }
        ended
    }

    /// Reuses the previous session's lease if it is still alive.
    async fn renew_lease(&mut self, client: &mut Client) -> Result<i64, StoreError> {
        if self.lease != 0 {
            let left = self.request(client.lease_time_to_live(self.lease, None)).await?;
            if left.ttl() > 0 {
                self.request(client.lease_client().keep_alive(self.lease)).await?;
                self.kept = Instant::now();
                return Ok(self.lease);
            }
        }
        self.lease = self.request(client.lease_grant(LEASE.as_secs() as i64, None)).await?.id();
        self.kept = Instant::now();
        Ok(self.lease)
    }

    /// Renews the lease after a third of its lifetime: a snapshot may take longer than the lease.
    async fn keep_lease(&mut self, client: &Client) -> Result<(), StoreError> {
        if self.kept.elapsed() >= LEASE / 3 {
            self.request(client.lease_client().keep_alive(self.lease)).await?;
            self.kept = Instant::now();
        }
        Ok(())
    }

    /// Reads a snapshot of the store at one revision, page by page.
    async fn read(&mut self, client: &Client) -> Result<(), StoreError> {
        let mut kv = client.kv_client().max_decoding_message_size(MESSAGE_MAX);
        let end = prefix_end();
        let (mut from, mut revision, mut limit) = (PREFIX.as_bytes().to_vec(), 0, PAGE_KEYS);
        let mut slowest = Duration::ZERO;
        self.overlay.begin_reading();
        loop {
            self.keep_lease(client).await?;
            let asked = Instant::now();
            let options = GetOptions::new().with_range(end.clone()).with_limit(limit).with_revision(revision);
            let page = match self.request_within(self.patience, kv.get(from.clone(), Some(options))).await {
                Err(error) if is_too_large(&error) && limit > 1 => {
                    limit = (limit / 8).max(1);
                    continue;
                }
                Err(StoreError::Silent) => {
                    self.patience = (self.patience * 2).min(PATIENCE_MAX);
                    return Err(StoreError::Silent);
                }
                page => page?,
            };
            slowest = slowest.max(asked.elapsed());
            if revision == 0 {
                revision = page.header().map_or(0, |header| header.revision());
            }
            page.kvs().iter().for_each(|kv| self.put(kv));
            match page.kvs().last() {
                Some(last) if page.more() => from = [last.key(), &[0]].concat(),
                _ => break,
            }
            limit = (limit * 2).min(PAGE_KEYS);
        }
        self.patience = (slowest * 2).clamp(REQUEST, PATIENCE_MAX);
        self.revision = revision;
        self.end_reading();
        self.turn();
        Ok(())
    }

    /// Follows the store's changes by a watch, writes this host's records, and renews the lease.
    async fn follow(&mut self, client: &Client, lease: i64) -> Result<(), StoreError> {
        let mut watching = client.watch_client().max_decoding_message_size(MESSAGE_MAX);
        let options =
            WatchOptions::new().with_prefix().with_start_revision(self.revision + 1).with_fragment();
        let mut watch = self.request(watching.watch(PREFIX, Some(options))).await?;
        let mut leases = client.lease_client();
        let (mut keeper, mut kept) = self.request(leases.keep_alive(lease)).await?;
        let mut alive = interval(LEASE / 3);
        alive.set_missed_tick_behavior(MissedTickBehavior::Delay);
        self.kept = Instant::now();
        let mut writing = JoinSet::new();
        // Spread the snapshots of agents that started at the same time.
        let spread = self.options.reread.mul_f64(0.5 + 0.5 * f64::from(self.lease as u8) / 255.0);
        let mut reread = Instant::now() + spread;
        loop {
            self.write(client, lease, &mut writing);
            tokio::select! {
                news = watch.message() => self.watched(news?)?,
                Some(done) = writing.join_next() => self.written(done),
                answer = kept.message() => match answer? {
                    Some(answer) if answer.ttl() > 0 => self.kept = Instant::now(),
                    _ => return Err(StoreError::Lease),
                },
                _ = alive.tick() => {
                    if self.kept.elapsed() >= LEASE {
                        return Err(StoreError::Silent);
                    }
                    self.request(keeper.keep_alive()).await?;
                }
                _ = tokio::time::sleep_until(reread) => {
                    self.read(client).await?;
                    reread = Instant::now() + self.options.reread;
                    continue;
                }
                _ = self.ticks.tick() => {}
            }
            self.turn();
        }
    }

    /// Handles a watch response.
    fn watched(&mut self, news: Option<WatchResponse>) -> Result<(), StoreError> {
        let news = news.ok_or_else(|| StoreError::Watch("closed by the store".into()))?;
        if news.canceled() {
            let why = match news.compact_revision() {
                0 => news.cancel_reason().to_string(),
                revision => format!("its start revision was compacted (now {revision})"),
            };
            return Err(StoreError::Watch(why));
        }
        for event in news.events() {
            let Some(kv) = event.kv() else { continue };
            self.revision = self.revision.max(kv.mod_revision());
            match event.event_type() {
                EventType::Put => self.put(kv),
                EventType::Delete => self.delete(kv),
            }
        }
        Ok(())
    }

    /// Starts transactions for the writes that are due.
    fn write(&mut self, client: &Client, lease: i64, writing: &mut JoinSet<Result<(), StoreError>>) {
        if writing.len() >= TRANSACTIONS_MAX {
            return;
        }
        let writes = self.overlay.writes(self.now_ms());
        let writes = self.signed(writes);
        for writes in writes.chunks(WRITES_MAX) {
            writing.spawn(commit(client.clone(), lease, writes.to_vec()));
        }
    }

    fn written(&mut self, done: Result<Result<(), StoreError>, tokio::task::JoinError>) {
        if let Ok(Err(error)) = done {
            let text = format!("the store refuses this host's records: {error}");
            self.overlay.alarm(Alarm::Write, self.now_ms(), text);
        }
    }

    /// Marks this host's records as withdrawn. The keys then expire with the lease instead of being deleted: other hosts could
    /// not tell a deleted record from a lost one.
    async fn leave(&mut self, client: Client, lease: i64) {
        let farewell = self.overlay.farewell();
        if let Err(error) = commit(client, lease, self.signed(farewell)).await {
            tracing::warn!("overlay: cannot announce in the store that this host leaves: {error}");
        }
    }
}

/// Commits writes as one transaction; if a key changed meanwhile, commits each write separately. The overlay decides about failed
/// writes again when the watch reports the change.
async fn commit(mut client: Client, lease: i64, writes: Vec<Write>) -> Result<(), StoreError> {
    if writes.is_empty() {
        return Ok(());
    }
    let all = transaction(&mut client, lease, &writes).await?;
    if !all && writes.len() > 1 {
        for write in writes.chunks(1) {
            transaction(&mut client, lease, write).await?;
        }
    }
    Ok(())
}

/// True if the transaction's comparisons held.
async fn transaction(client: &mut Client, lease: i64, writes: &[Write]) -> Result<bool, StoreError> {
    let unchanged = |write: &Write| Compare::mod_revision(write.key.clone(), CompareOp::Equal, write.expect);
    let operation = |write: &Write| match &write.value {
        Some(value) => {
            TxnOp::put(write.key.clone(), value.clone(), Some(PutOptions::new().with_lease(lease)))
        }
        None => TxnOp::delete(write.key.clone(), None),
    };
    let transaction = Txn::new()
        .when(writes.iter().map(unchanged).collect::<Vec<_>>())
        .and_then(writes.iter().map(operation).collect::<Vec<_>>());
    let done = tokio::time::timeout(REQUEST, client.txn(transaction)).await;
    Ok(done.map_err(|_| StoreError::Silent)??.succeeded())
}

/// End of the key range of [`PREFIX`].
fn prefix_end() -> Vec<u8> {
    let mut end = PREFIX.as_bytes().to_vec();
    if let Some(last) = end.last_mut() {
        *last += 1;
    }
    end
}

/// True if a response exceeded the message limit.
fn is_too_large(error: &StoreError) -> bool {
    matches!(error, StoreError::Etcd(etcd_client::Error::GRpcStatus(status))
        if status.message().contains("too large") || status.message().contains("larger than max"))
}
