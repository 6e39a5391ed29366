//! Sealed pieces on their way into the index. The sealers of a process are many and their pieces small, so those that come together share a transaction, as the
//! intents to write their objects do.

use std::time::Duration;

use futures::FutureExt;
use towpath_chassis::{
    Chassis, Error, Result,
    group::{Answer, Group, Lanes, halving},
    lease,
};
use towpath_schemas::{event, frame::EndRecord, id::TenantId};
use uuid::Uuid;

use crate::{
    chunk::Sealed,
    stream::Epoch,
    table::{self, Closing},
};

/// Transactions at a time, pieces in each, and how long each may take: less than a sealer's lease.
const LANES: Lanes = Lanes { lanes: 2, most: 256, limit: Duration::from_secs(8) };

/// A piece that is in the store.
pub(crate) struct Piece {
    pub of: Epoch,
    pub chunk: Sealed,
    pub object_key: String,
    /// The record ends with it.
    pub end: Option<EndRecord>,
    /// Who seals it, for giving back the lease at the end.
    pub owner: Uuid,
}

/// What came of a piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Committed {
    Indexed,
    /// It was the last one: the record is closed and the lease given back.
    Closed,
    /// It does not follow the last one: somebody else sealed these frames.
    NotNext,
}

/// The commits of this process's sealers.
#[derive(Clone)]
pub(crate) struct Commits {
    begins: Group<(TenantId, String), Answer<()>>,
    pieces: Group<Piece, Answer<Committed>>,
}

impl Commits {
    pub fn start(chassis: &Chassis) -> Self {
        let (own, other) = (chassis.clone(), chassis.clone());
        let begins = Group::start(&chassis.tasks, LANES, move |batch: Vec<(TenantId, String)>| {
            let chassis = own.clone();
            async move { halving(&batch, |part| begin(&chassis, part).boxed()).await }
        });
        let pieces = Group::start(&chassis.tasks, LANES, move |batch: Vec<Piece>| {
            let chassis = other.clone();
            async move { halving(&batch, |part| commit(&chassis, part).boxed()).await }
        });
        Self { begins, pieces }
    }

    /// Commits the intent to write an object, before its PUT.
    pub async fn begin(&self, tenant: TenantId, object_key: String) -> Result<()> {
        Ok(self.begins.submit((tenant, object_key)).await??)
    }

    /// Returns once the piece is in the index.
    pub async fn commit(&self, piece: Piece) -> Result<Committed> {
        Ok(self.pieces.submit(piece).await??)
    }
}

async fn begin(chassis: &Chassis, batch: &[(TenantId, String)]) -> Result<Vec<()>> {
    towpath_file::objects_begin(&chassis.db, batch).await?;
    Ok(vec![(); batch.len()])
}

async fn commit(chassis: &Chassis, batch: &[Piece]) -> Result<Vec<Committed>> {
    metrics::histogram!("towpath_seal_batch").record(batch.len() as f64);
    let mut work = chassis.begin().await?;
    let indexed = table::index(&mut work, batch).await?;
    let followed: Vec<&Piece> = batch.iter().filter(|piece| indexed.all.contains(&piece.of)).collect();
    let endings: Vec<(Epoch, u64, Closing<'_>)> =
        followed.iter().filter_map(|piece| Some((piece.of, piece.chunk.last_seq, Closing::End(piece.end.as_ref()?)))).collect();
    let closed = table::close(&mut work, &endings).await?;
    let objects: Vec<(String, u64)> = followed.iter().map(|piece| (piece.object_key.clone(), piece.chunk.body.len() as u64)).collect();
    if !towpath_file::objects_live(&mut work, &objects).await? {
        // In a batch the one that is swept already is found by halving; alone it is sealed again under another key.
        return Err(Error::broken("an object was swept before its piece was committed"));
    }
    // After its own piece's object: an epoch that keeps next to nothing may drop that one, too.
    table::cut_middle(&mut work, &indexed.over).await?;
    let given_back: Vec<(String, Uuid)> =
        batch.iter().filter(|piece| closed.contains(&piece.of)).map(|piece| (table::lease_name(piece.of), piece.owner)).collect();
    lease::release_all(&mut work, &given_back).await?;
    for piece in followed {
        let kind = event::Kind::Sealed { epoch: piece.of.epoch, seq: i64::try_from(piece.chunk.last_seq).unwrap_or(i64::MAX) };
        work.event(piece.of.tenant, piece.of.run, kind);
    }
    work.commit().await?;
    Ok(batch
        .iter()
        .map(|piece| match (indexed.all.contains(&piece.of), closed.contains(&piece.of)) {
            (_, true) => Committed::Closed,
            (true, false) => Committed::Indexed,
            (false, false) => Committed::NotNext,
        })
        .collect())
}
